// Unigram models of words.

// The pieces with the highest sum of scores (Viterbi); neighbouring unknown characters are one piece.
wordModels.Unigram = (model, ids) => {
  const tree = new TextTree();
  for (const [piece, id] of ids) tree.add(piece, id);
  const unknown = model.scores.reduce((low, score) => Math.min(low, score), Infinity) - 10;

  function best(word) {
    const sums = new Float64Array(word.length + 1);
    const starts = new Int32Array(word.length + 1).fill(-1);
    const pieces = new Int32Array(word.length + 1);
    const offer = (start, end, id, score) => {
      if (starts[end] >= 0 && sums[start] + score <= sums[end]) return;
      sums[end] = score + sums[start];
      starts[end] = start;
      pieces[end] = id;
    };
    for (let start = 0, single; start < word.length; start = single) {
      single = start + (word.codePointAt(start) > 0xffff ? 2 : 1);
      let known = false;
      tree.each(word, start, (end, id) => {
        offer(start, end, id, model.scores[id]);
        known ||= end === single;
      });
      if (!known) {
        if (model.unk === null) throw new Error("this vocabulary has no token for an unknown character");
        offer(start, single, model.unk, unknown);
      }
    }
    const texts = [];
    let run = null; // the end of a run of unknown characters
    for (let end = word.length; end > 0; end = starts[end]) {
      if (pieces[end] === model.unk) {
        if (run === null) texts.push(word.slice(starts[end], (run = end)));
        else texts[texts.length - 1] = word.slice(starts[end], run);
      } else {
        run = null;
        texts.push(word.slice(starts[end], end));
      }
    }
    return texts.reverse();
  }

  return (word) =>
    best(word).flatMap((text) => ids.get(text) ?? (model.fallback ? byteIds(ids, text) : null) ?? model.unk);
};
