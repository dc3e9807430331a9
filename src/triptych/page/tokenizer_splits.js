// Splits Contiguous, MergedWithPrevious, MergedWithNext and Metaspace, which few tokenizers but SentencePiece's have.

// Neighbouring pieces in one word where `joins(match, before)` says so, of a piece and the one before it.
const joined = (joins) => (pieces) => {
  const words = [];
  let before = false;
  for (const [start, end, match] of pieces) {
    if (words.length && joins(match, before)) words.at(-1)[1] = end;
    else words.push([start, end]);
    before = match;
  }
  return words;
};

Object.assign(behaviors, {
  Contiguous: joined((match, before) => match === before),
  MergedWithPrevious: joined((match, before) => match && !before),
  MergedWithNext: joined((match, before) => !match && before),
});

splitters.metaspace = ({ mark, scheme, split }) => {
  const marks = new RegExp(escaped(mark.codePointAt(0)), "gu");
  return (piece) => {
    let text = piece.text.replaceAll(" ", () => mark);
    if (!text.startsWith(mark) && (scheme === "always" || (scheme === "first" && piece.first))) text = mark + text;
    return split ? splitAt({ ...piece, text }, marks, "MergedWithNext", false) : [{ ...piece, text }];
  };
};
