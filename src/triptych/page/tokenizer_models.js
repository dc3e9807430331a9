// What models of words have in common; tokenizer_bpe.js, tokenizer_unigram.js and tokenizer_words.js add functions from
// words to token ids, as the `tokenizers` library computes them.

const wordModels = {}; // type -> function(model, ids) that makes a function from a word to token ids

// A tree of texts by their UTF-16 units; a node is a number.
class TextTree {
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

// The ids of the tokens `<0x00>` to `<0xFF>` for the bytes of a text; null where one is missing.
function byteIds(ids, text) {
  const nameOfByte = (byte) => `<0x${byte.toString(16).toUpperCase().padStart(2, "0")}>`;
  const found = Array.from(utf8.encode(text), (byte) => ids.get(nameOfByte(byte)));
  return found.includes(undefined) ? null : found;
}
