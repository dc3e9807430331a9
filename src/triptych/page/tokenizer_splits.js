// Splits into words that few tokenizers have, SentencePiece's above all.

(() => {
  const { behaviors, escaped, parts, splitters } = tokenText;

  Object.assign(behaviors, {
    Contiguous(pieces) {
      const runs = [];
      let before = false;
      for (const [start, end, match] of pieces) {
        if (match === before && runs.length) runs.at(-1)[1] = end;
        else runs.push([start, end]);
        before = match;
      }
      return runs;
    },
    MergedWithPrevious(pieces) {
      const words = [];
      let before = false;
      for (const [start, end, match] of pieces) {
        if (match && !before && words.length) words.at(-1)[1] = end;
        else words.push([start, end]);
        before = match;
      }
      return words;
    },
    MergedWithNext(pieces) {
      const words = [];
      let behind = false;
      for (const [start, end, match] of pieces.toReversed()) {
        if (match && !behind && words.length) words.at(-1)[0] = start;
        else words.push([start, end]);
        behind = match;
      }
      return words.reverse();
    },
  });

  Object.assign(splitters, {
    metaspace({ mark, scheme, split }) {
      const marks = new RegExp(escaped(mark.codePointAt(0)), "gu");
      return (piece) => {
        let text = piece.text.replaceAll(" ", () => mark);
        if (!text.startsWith(mark) && (scheme === "always" || (scheme === "first" && piece.first))) text = mark + text;
        return split ? parts({ ...piece, text }, marks, "MergedWithNext", false) : [{ ...piece, text }];
      };
    },
  });
})();
