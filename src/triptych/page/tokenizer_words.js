// WordPiece and lists of words, and how WordPiece is decoded.

// The longest piece that fits, from left to right; a word with a gap is unknown as a whole.
wordModels.WordPiece = (model, ids) => {
  const longest = model.tokens.reduce((most, token) => Math.max(most, token?.length ?? 0), 0);
  return (word) => {
    const chars = Array.from(word);
    if (chars.length > model.longest) return [model.unk];
    const row = [];
    for (let start = 0; start < chars.length; ) {
      let end = Math.min(chars.length, start + longest);
      let id;
      for (; end > start && id === undefined; end--) {
        id = ids.get((start > 0 ? model.inside : "") + chars.slice(start, end).join(""));
      }
      if (id === undefined) return [model.unk];
      row.push(id);
      start = end + 1;
    }
    return row;
  };
};

wordModels.WordLevel = (model, ids) => (word) => {
  const id = ids.get(word) ?? model.unk;
  if (id === null) throw new Error("this vocabulary has no token for an unknown word");
  return [id];
};

Tokenizer.decoders.WordPiece = ({ prefix, cleanup }) => {
  const spaced = [[" .", "."], [" ?", "?"], [" !", "!"], [" ,", ","], [" ' ", "'"], [" n't", "n't"], [" 'm", "'m"],
    [" do not", " don't"], [" 's", "'s"], [" 've", "'ve"], [" 're", "'re"]];
  return (tokens) => tokens.map((token, i) => {
    const text = i === 0 ? token : token.startsWith(prefix) ? token.slice(prefix.length) : ` ${token}`;
    return cleanup ? spaced.reduce((now, [from, to]) => now.replaceAll(from, () => to), text) : text;
  });
};
