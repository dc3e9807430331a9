// Characters and texts for the tokenizer: sets of characters, normalizers, and splits into words.  The steps and the
// sets come from `tokenizer_data.py`; the sets are those of the library, so that the version of Unicode that this
// browser knows does not matter.

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

// The code points at which a set begins and ends, in turn; an end is the first one that does not belong to it.
function bounds(packed) {
  let at = 0;
  return Int32Array.from(packed, (step) => (at += step));
}

// The inside of a class of a regular expression.
const escaped = (code) => `\\u{${code.toString(16)}}`;
const classOf = (packed) =>
  Array.from(bounds(packed), (code, i) => (i % 2 ? `-${escaped(code - 1)}` : escaped(code))).join("");

// A function that tells whether a code point belongs to a set.
function membership(packed) {
  const ends = bounds(packed);
  return (code) => {
    let low = 0;
    let high = ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (ends[middle] <= code) low = middle + 1;
      else high = middle;
    }
    return low % 2 === 1;
  };
}

// Texts, and at odd places names of sets, as one regular expression.
const expression = (texts, sets) =>
  new RegExp(texts.map((text, i) => (i % 2 ? `[${classOf(sets[text])}]` : text)).join(""), "gu");

// The 256 characters with which byte-level vocabularies write bytes (Radford et al. 2019), and back.
const printable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
const letterOfByte = [];
let others = 256;
for (let byte = 0; byte < 256; byte++) letterOfByte.push(String.fromCharCode(printable(byte) ? byte : others++));
const byteOfLetter = new Map(letterOfByte.map((letter, byte) => [letter, byte]));
const bytesOfToken = (token) => Array.from(token, (letter) => byteOfLetter.get(letter));
const asBytes = (text) => Array.from(utf8.encode(text), (byte) => letterOfByte[byte]).join("");

// A function of a text that changes all matches.
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
    const is = membership(sets[set]);
    return (text) => {
      let [start, end] = [0, text.length]; // white space is never made of two code units
      while (left && start < end && is(text.charCodeAt(start))) start++;
      while (right && start < end && is(text.charCodeAt(end - 1))) end--;
      return text.slice(start, end);
    };
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
