// Words to token ids: byte-pair encoding, WordPiece, unigram models and lists of words, as the `tokenizers` library
// computes them.

const tokenModels = (() => {
  // A tree of texts by their UTF-16 units; a node is a number.
  class Tree {
    next = new Map();
    ends = new Map(); // node -> value
    size = 1;

    add(text, value) {
      let node = 0;
      for (let i = 0; i < text.length; i++) {
        const key = node * 65536 + text.charCodeAt(i);
        let following = this.next.get(key);
        if (following === undefined) this.next.set(key, (following = this.size++));
        node = following;
      }
      this.ends.set(node, value);
    }

    // Calls `act` with the end and the value of every text of the tree that stands at `start`, the shortest first.
    each(text, start, act) {
      let node = 0;
      for (let i = start; i < text.length; i++) {
        node = this.next.get(node * 65536 + text.charCodeAt(i));
        if (node === undefined) return;
        const value = this.ends.get(node);
        if (value !== undefined) act(i + 1, value);
      }
    }
  }

  // A heap of numbers, the smallest first.
  class Heap {
    keys = [];

    push(key) {
      const { keys } = this;
      let at = keys.push(key) - 1;
      while (at > 0 && keys[(at - 1) >> 1] > key) {
        keys[at] = keys[(at - 1) >> 1];
        at = (at - 1) >> 1;
      }
      keys[at] = key;
    }

    pop() {
      const { keys } = this;
      const [top] = keys;
      const key = keys.pop();
      if (keys.length === 0) return top;
      let at = 0;
      for (let child = 1; child < keys.length; child = 2 * at + 1) {
        if (child + 1 < keys.length && keys[child + 1] < keys[child]) child++;
        if (keys[child] >= key) break;
        keys[at] = keys[child];
        at = child;
      }
      keys[at] = key;
      return top;
    }
  }

  // The ids of the tokens `<0x00>` to `<0xFF>` for the bytes of a text; null where one is missing.
  function fallback(ids, text) {
    const found = Array.from(tokenText.utf8.encode(text), (byte) =>
      ids.get(`<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`),
    );
    return found.includes(undefined) ? null : found;
  }

  function bpe(model, ids) {
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
        const bytes = model.fallback ? fallback(ids, text) : null;
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
      const heap = new Heap();
      const rank = (at) => (at >= 0 && after[at] >= 0 ? ranks.get(row[at] * width + row[after[at]]) : undefined);
      const offer = (at) => {
        const place = rank(at);
        if (place !== undefined) heap.push(place * PLACES + at);
      };
      for (let i = 0; i + 1 < row.length; i++) offer(i);
      while (heap.keys.length) {
        const key = heap.pop();
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
  }

  // The longest piece that fits, from left to right; a word with a gap is unknown as a whole.
  function wordPiece(model, ids) {
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
  }

  // The pieces with the highest sum of scores (Viterbi); neighbouring unknown characters are one piece.
  function unigram(model, ids) {
    const tree = new Tree();
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
      best(word).flatMap((text) => ids.get(text) ?? (model.fallback ? fallback(ids, text) : null) ?? model.unk);
  }

  const words = (model, ids) => (word) => {
    const id = ids.get(word) ?? model.unk;
    if (id === null) throw new Error("this vocabulary has no token for an unknown word");
    return [id];
  };

  return { Tree, kinds: { BPE: bpe, WordPiece: wordPiece, Unigram: unigram, WordLevel: words } };
})();
