// Characters and texts for the tokenizer: sets of characters, normalizers, and splits into words.  The steps and the
// sets come from `tokenizer_data.py`; the sets are those of the library, so that the version of Unicode that this
// browser knows does not matter.

const tokenText = (() => {
  const utf8 = new TextEncoder();
  const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

  // The text of bytes; null where they are no UTF-8.
  function whole(bytes) {
    try {
      return strict.decode(bytes);
    } catch {
      return null;
    }
  }

  // The code points of a set, as pairs of the first one and the one after the last.
  function ranges(packed) {
    const pairs = [];
    let at = 0;
    for (let i = 0; i < packed.length; i += 2) {
      const first = at + packed[i];
      at = first + packed[i + 1];
      pairs.push([first, at]);
    }
    return pairs;
  }

  // The inside of a class of a regular expression.
  const escaped = (code) => `\\u{${code.toString(16)}}`;
  const classOf = (packed) => ranges(packed).map(([first, end]) => `${escaped(first)}-${escaped(end - 1)}`).join("");

  // A function that tells whether a code point belongs to a set.
  function membership(packed) {
    const bounds = Int32Array.from(ranges(packed).flat());
    return (code) => {
      let low = 0;
      let high = bounds.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (bounds[middle] <= code) low = middle + 1;
        else high = middle;
      }
      return low % 2 === 1;
    };
  }

  // Texts, and at odd places names of sets, as one regular expression.
  const expression = (parts, sets) =>
    new RegExp(parts.map((part, i) => (i % 2 ? `[${classOf(sets[part])}]` : part)).join(""), "gu");

  // The 256 characters with which byte-level vocabularies write bytes (Radford et al. 2019), and back.
  const printable = (byte) => (byte > 32 && byte < 127) || (byte > 160 && byte !== 173);
  const letterOfByte = [];
  let others = 256;
  for (let byte = 0; byte < 256; byte++) letterOfByte.push(String.fromCharCode(printable(byte) ? byte : others++));
  const byteOfLetter = new Map(letterOfByte.map((letter, byte) => [letter, byte]));
  const bytesOf = (token) => Array.from(token, (letter) => byteOfLetter.get(letter));
  const asBytes = (text) => Array.from(utf8.encode(text), (byte) => letterOfByte[byte]).join("");

  // A function of a text that changes all matches.
  const replacing = (parts, sets, change) => {
    const matches = expression(parts, sets);
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

  function parts({ text, first }, pattern, behavior, invert) {
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
      return (piece) => parts(piece, matches, behavior, invert);
    },
    prefix: () => (piece) => [piece.text.startsWith(" ") ? piece : { ...piece, text: ` ${piece.text}` }],
    bytes: () => (piece) => [{ ...piece, text: asBytes(piece.text) }],
  };

  return { behaviors, bytesOf, escaped, membership, normalizers, parts, replacing, splitters, utf8, whole };
})();
