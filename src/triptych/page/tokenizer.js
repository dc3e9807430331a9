// The tokenizer of a page: texts to token ids and back, with the ids of the Python library (`tokenizer_data`).
// A half of a surrogate pair is read as U+FFFD, where Python refuses the text.  The sets of characters in the data are
// the library's, so that the version of Unicode that this browser knows does not matter.

const utf8 = new TextEncoder();
const strictUtf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

// The text of bytes; null where they are no UTF-8.
function textOf(bytes) {
  try {
    return strictUtf8.decode(bytes);
  } catch {
    return null;
  }
}

// A set as a class of a regular expression.  It is given by the steps between the code points at which it begins and
// ends, in turn; an end is the first one that does not belong to it.
const escaped = (code) => `\\u{${code.toString(16)}}`;
function classOf(packed) {
  let at = 0;
  const ends = packed.map((step) => (at += step));
  return `[${ends.map((code, i) => (i % 2 ? `-${escaped(code - 1)}` : escaped(code))).join("")}]`;
}

// A function that tells whether a code point belongs to a set.
function membership(packed) {
  const one = new RegExp(classOf(packed), "u");
  return (code) => one.test(String.fromCodePoint(code));
}

// Texts, and at odd places names of sets, as one regular expression.
const expression = (texts, sets) =>
  new RegExp(texts.map((text, i) => (i % 2 ? classOf(sets[text]) : text)).join(""), "gu");

// The 256 characters with which byte-level vocabularies write bytes (Radford et al. 2019), and back.
const printable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
const letterOfByte = [];
let others = 256;
for (let byte = 0; byte < 256; byte++) letterOfByte.push(String.fromCharCode(printable(byte) ? byte : others++));
const byteOfLetter = new Map(letterOfByte.map((letter, byte) => [letter, byte]));
const bytesOfToken = (token) => Array.from(token, (letter) => byteOfLetter.get(letter));
const asBytes = (text) => Array.from(utf8.encode(text), (byte) => letterOfByte[byte]).join("");

const replacing = (texts, sets, change) => {
  const matches = expression(texts, sets);
  return (text) => text.replace(matches, change);
};

// step -> function(step, sets) that makes a function of a text.
const normalizers = {
  unicode: ({ form, set }, sets) => replacing(["", set, "+"], sets, (run) => run.normalize(form)),
  lower: ({ set }, sets) => replacing(["", set, ""], sets, (char) => char.toLowerCase()),
  around: ({ set }, sets) => replacing(["", set, ""], sets, (char) => ` ${char} `),
  replace: ({ pattern, content }, sets) => replacing(pattern, sets, () => content),
  strip({ set, left, right }, sets) {
    const ends = [left && ["^", set, "+"], right && ["", set, "+$"]].filter((texts) => texts);
    const strips = ends.map((texts) => replacing(texts, sets, () => ""));
    return (text) => strips.reduce((now, strip) => strip(now), text);
  },
  prepend: ({ content }) => (text) => (text ? content + text : text),
  bytes: () => asBytes,
};

// Pieces of `text` as [start, end, whether the pattern matched], without gaps.  `matchAll` would copy the pattern,
// which takes longer than to match a short word.
function matched(text, pattern, invert) {
  const pieces = [];
  let at = 0;
  pattern.lastIndex = 0;
  for (let match; (match = pattern.exec(text)); ) {
    if (match.index > at) pieces.push([at, match.index, invert]);
    at = match.index + match[0].length;
    pieces.push([match.index, at, !invert]);
    if (match[0] === "") pattern.lastIndex += text.codePointAt(at) > 0xffff ? 2 : 1;
  }
  if (at < text.length) pieces.push([at, text.length, invert]);
  return pieces;
}

// What becomes of the matches, by the names of the library; tokenizer_splits.js adds those of few tokenizers.
const behaviors = {
  Isolated: (pieces) => pieces,
  Removed: (pieces) => pieces.filter(([, , match]) => !match),
};

function splitAt({ text, first }, pattern, behavior, invert) {
  const words = [];
  for (const [start, end] of behaviors[behavior](matched(text, pattern, invert))) {
    if (end > start) words.push({ text: text.slice(start, end), first: first && start === 0 });
  }
  return words;
}

// step -> function(step, sets) that makes a function from a piece, { text, first }, to a list of pieces.  `first`
// tells whether the whole text begins with the piece.
const splitters = {
  split({ pattern, behavior, invert }, sets) {
    const matches = expression(pattern, sets);
    return (piece) => splitAt(piece, matches, behavior, invert);
  },
  prefix: () => (piece) => [piece.text.startsWith(" ") ? piece : { ...piece, text: ` ${piece.text}` }],
  bytes: () => (piece) => [{ ...piece, text: asBytes(piece.text) }],
};

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

const SIGNS = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍" }; // of white space in the names of tokens

class Tokenizer {
  constructor(data) {
    const { model, sets, added } = data;
    const made = (table, steps) => steps.map((step) => table[step.step](step, sets));
    this.data = data;
    this.normalizers = made(normalizers, data.normalize);
    this.splitters = made(splitters, data.split);
    this.decoders = made(Tokenizer.decoders, data.decode);
    this.early = Tokenizer.tree(added.filter(({ late }) => !late));
    this.late = Tokenizer.tree(added.filter(({ late }) => late));
    this.isSpace = membership(sets["white space"] ?? []);
    this.isWord = membership(sets.word ?? []);
    const ids = new Map();
    model.tokens.forEach((token, id) => token !== null && ids.set(token, id));
    this.words = wordModels[model.type](model, ids);
    this.tokens = new Map(model.tokens.entries());
    for (const { id, text } of added) this.tokens.set(id, text);
    this.special = new Set(added.filter((token) => token.special).map((token) => token.text));
    this.addedIds = new Set(added.map((token) => token.id));
  }

  static tree(added) {
    const tree = new TextTree();
    for (const token of added) tree.add(token.found, token);
    return tree.size > 1 ? tree : null;
  }

  encode(text) {
    const whole = text.toWellFormed();
    const ids = [];
    for (const piece of this.split({ text: whole, first: true }, this.early)) {
      if (piece.id !== undefined) ids.push(piece.id);
      else this.encodePart(piece, ids);
    }
    const { before, after, bos } = this.data;
    const all = before.concat(ids, after);
    return bos !== null && whole.startsWith(bos) ? all.slice(1) : all;
  }

  // Text between the added tokens that are found in it as it stands.
  encodePart({ text, first }, ids) {
    const normal = this.normalizers.reduce((now, normalize) => normalize(now), text);
    for (const piece of this.split({ text: normal, first }, this.late)) {
      if (piece.id !== undefined) {
        ids.push(piece.id);
        continue;
      }
      const words = this.splitters.reduce((now, split) => now.flatMap(split), [piece]);
      for (const word of words) for (const id of this.words(word.text)) ids.push(id);
    }
  }

  // Added tokens in the text of a piece, the leftmost first and of those the longest, and the pieces between them.
  split({ text, first }, tree) {
    if (!text) return [];
    if (!tree) return [{ text, first }];
    const pieces = [];
    let from = 0;
    const between = (end) => {
      if (from < end) pieces.push({ text: text.slice(from, end), first: first && from === 0 });
    };
    for (let at = 0; at < text.length; ) {
      let token;
      let end = at + 1;
      tree.each(text, at, (stop, value) => {
        token = value;
        end = stop;
      });
      if (token && !(token.word && (this.wordBefore(text, at) || this.wordAt(text, end)))) {
        let start = at;
        let stop = end;
        while (token.left && start > from && this.isSpace(text.charCodeAt(start - 1))) start--;
        while (token.right && stop < text.length && this.isSpace(text.charCodeAt(stop))) stop++;
        between(start);
        pieces.push({ id: token.id });
        from = stop;
      }
      at = end;
    }
    between(text.length);
    return pieces;
  }

  wordAt(text, at) {
    return at < text.length && this.isWord(text.codePointAt(at));
  }

  wordBefore(text, at) {
    const low = at > 1 && text.charCodeAt(at - 1) >> 10 === 0x37; // the second half of a surrogate pair
    return at > 0 && this.wordAt(text, at - (low ? 2 : 1));
  }

  decode(ids) {
    const tokens = ids.map((id) => this.tokens.get(id)).filter((token) => token != null && !this.special.has(token));
    const text = this.decoders.reduce((now, decode) => decode(now), tokens).join("");
    return this.data.clean.reduce((now, [spaced, ending]) => now.replaceAll(spaced, () => ending), text);
  }

  pieces(ids) {
    return ids.map((id) => {
      const token = this.tokens.get(id);
      if (token == null) return `<${id}>`;
      if (this.addedIds.has(id)) return token;
      const { bytes, marks } = this.data.names;
      const letters = bytes ? bytesOfToken(token) : [undefined];
      let text = !bytes && marks ? token.replaceAll("▁", " ") : token;
      if (!letters.includes(undefined)) text = Tokenizer.escapedBytes(Uint8Array.from(letters));
      return text.replace(/[ \n\t\r]/g, (char) => SIGNS[char]);
    });
  }

  // UTF-8 as text; a byte that belongs to no whole character is written as \xe2.
  static escapedBytes(bytes) {
    let text = "";
    for (let at = 0, size; at < bytes.length; at += size) {
      const sizes = [1, 2, 3, 4].filter((one) => at + one <= bytes.length);
      size = sizes.find((one) => textOf(bytes.subarray(at, at + one)) !== null) ?? 1;
      text += textOf(bytes.subarray(at, at + size)) ?? `\\x${bytes[at].toString(16).padStart(2, "0")}`;
    }
    return text;
  }
}

// step -> function(step, sets) that makes a function from a list of tokens to a list of texts; tokenizer_decoders.js
// adds those of few tokenizers.
Tokenizer.decoders = {
  spaces: () => (tokens) => [tokens.join(" ")],
  Fuse: () => (tokens) => [tokens.join("")],
  ByteLevel: () => (tokens) => {
    const bytes = tokens.flatMap((token) => {
      const letters = bytesOfToken(token);
      return letters.includes(undefined) ? Array.from(utf8.encode(token)) : letters;
    });
    return [new TextDecoder("utf-8", { ignoreBOM: true }).decode(Uint8Array.from(bytes))];
  },
};
