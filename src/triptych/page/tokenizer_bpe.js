// Byte-pair encoding of words.

// A heap of numbers, the smallest first.
function pushKey(heap, key) {
  let at = heap.push(key) - 1;
  while (at > 0 && heap[(at - 1) >> 1] > key) {
    heap[at] = heap[(at - 1) >> 1];
    at = (at - 1) >> 1;
  }
  heap[at] = key;
}

function popKey(heap) {
  const [top] = heap;
  const key = heap.pop();
  if (heap.length === 0) return top;
  let at = 0;
  for (let child = 1; child < heap.length; child = 2 * at + 1) {
    if (child + 1 < heap.length && heap[child + 1] < heap[child]) child++;
    if (heap[child] >= key) break;
    heap[at] = heap[child];
    at = child;
  }
  heap[at] = key;
  return top;
}

wordModels.BPE = (model, ids) => {
  const width = model.tokens.length;
  const ranks = new Map(); // a pair of ids as one number -> place among the merges
  const results = [];
  for (let i = 0; i < model.merges.length; i += 3) {
    ranks.set(model.merges[i] * width + model.merges[i + 1], i / 3);
    results.push(model.merges[i + 2]);
  }

  function symbols(word) {
    const row = [];
    let unknown = false;
    const flush = () => {
      if (unknown) row.push(model.unk);
      unknown = false;
    };
    const chars = Array.from(word);
    chars.forEach((char, i) => {
      const text = (i > 0 ? model.inside : "") + char + (i === chars.length - 1 ? model.last : "");
      const id = ids.get(text);
      if (id !== undefined) {
        flush();
        row.push(id);
        return;
      }
      const bytes = model.fallback ? byteIds(ids, text) : null;
      if (bytes) row.push(...bytes);
      else if (model.unk !== null) {
        if (!model.fuse) flush();
        unknown = true;
      }
    });
    flush();
    return row;
  }

  // The first merge of the list is done first, and of equal ones the leftmost.  The symbols are a linked list; what
  // is taken from the heap is skipped where its pair has changed since.
  const PLACES = 2 ** 28;
  function merged(row) {
    const before = row.map((_, i) => i - 1);
    const after = row.map((_, i) => (i + 1 < row.length ? i + 1 : -1));
    const heap = [];
    const rank = (at) => (at >= 0 && after[at] >= 0 ? ranks.get(row[at] * width + row[after[at]]) : undefined);
    const offer = (at) => {
      const place = rank(at);
      if (place !== undefined) pushKey(heap, place * PLACES + at);
    };
    for (let i = 0; i + 1 < row.length; i++) offer(i);
    while (heap.length) {
      const key = popKey(heap);
      const at = key % PLACES;
      if (row[at] === null) continue;
      const place = rank(at);
      const result = results[(key - at) / PLACES];
      if (place === undefined || results[place] !== result) continue;
      const gone = after[at];
      row[at] = result;
      row[gone] = null;
      after[at] = after[gone];
      if (after[at] >= 0) before[after[at]] = at;
      offer(before[at]);
      offer(at);
    }
    return row.filter((id) => id !== null);
  }

  return (word) => {
    const whole = model.whole ? ids.get(word) : undefined;
    return whole === undefined ? merged(symbols(word)) : [whole];
  };
};
