// Characters and texts for the tokenizer: sets of characters, normalizers, and splits into words.  The steps and the
// sets come from `tokenizer_data.py`; the sets are those of the library, so that the version of Unicode that this
// browser knows does not matter.

const tokenText = (() => {
  const utf8 = new TextEncoder();

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
  const asBytes = (text) => Array.from(utf8.encode(text), (byte) => letterOfByte[byte]).join("");

  // The part of a Hangul syllable that a code point can be joined by: its first, middle or last sounds.
  function hangulOf(code) {
    if ((code >= 0x1100 && code < 0x1160) || (code >= 0xa960 && code < 0xa97d)) return "L";
    if ((code >= 0x1160 && code < 0x11a8) || (code >= 0xd7b0 && code < 0xd7c7)) return "V";
    if ((code >= 0x11a8 && code < 0x1200) || (code >= 0xd7cb && code < 0xd7fc)) return "T";
    if (code >= 0xac00 && code < 0xd7a4) return (code - 0xac00) % 28 ? "T" : "V";
    return "";
  }

  // What decides about clusters, of a code point; remembered, because texts repeat their characters.
  function properties(classes, sets) {
    const tests = classes.map((name) => [name, membership(sets[name])]);
    const seen = new Map();
    return (code) => {
      if (!seen.has(code)) {
        const facts = { code, hangul: hangulOf(code), syllable: code >= 0xac00 && code < 0xd7a4 };
        for (const [name, test] of tests) facts[name] = test(code);
        seen.set(code, facts);
      }
      return seen.get(code);
    };
  }

  // Where grapheme clusters end (Unicode, UAX 29), as far as clusters of up to 5 bytes need it: pairs of regional
  // indicators are left out, because one has 4 bytes.  Calls `act` with the characters of each cluster.
  function clusters(text, known, act) {
    const follows = { L: /[LVTS]/, V: /[VT]/, T: /T/ };
    let cluster = [];
    let last = null; // what is known of the last character
    let picture = false; // a pictograph and marks behind it
    let conjunct = ""; // a consonant, and whether a linker is behind it
    for (const char of text) {
      const now = known(char.codePointAt(0));
      let joined = false;
      if (last === null || (last.code === 13 && now.code === 10)) joined = true;
      else if (last.control || now.control) joined = false;
      else if (now.extend || last.prepend) joined = true;
      else if (last.hangul && now.hangul) joined = now.syllable ? last.hangul === "L" : follows[last.hangul].test(now.hangul);
      else if (last.code === 0x200d && picture && now.pictograph) joined = true;
      else joined = conjunct === "linked" && now.consonant;
      if (!joined) {
        act(cluster);
        cluster = [];
      }
      picture = now.extend ? picture && joined : now.pictograph;
      if (now.consonant) conjunct = "consonant";
      else if (conjunct && now.linker) conjunct = "linked";
      else if (!now.conjunct) conjunct = "";
      cluster.push(char);
      last = now;
    }
    if (cluster.length) act(cluster);
  }

  // SentencePiece's compiled table: a double array of 32-bit units over the bytes of a text, then the replacements.
  function charsmap(table, known) {
    const bytes = Uint8Array.from(atob(table), (char) => char.charCodeAt(0));
    const size = new DataView(bytes.buffer).getUint32(0, true);
    const units = new Uint32Array(bytes.buffer.slice(4, 4 + size));
    const texts = bytes.subarray(4 + size);
    const offset = (unit) => (unit >>> 10) << ((unit & 512) >>> 6);

    // The replacement of the shortest entry that `key` begins with, as the library looks it up; undefined without one.
    function lookup(key) {
      let at = offset(units[0]);
      for (const byte of key) {
        if (byte === 0) return undefined;
        at ^= byte;
        const unit = units[at];
        if ((unit & 0x800000ff) !== byte) return undefined;
        at ^= offset(unit);
        if ((unit >>> 8) & 1) {
          const first = units[at] & 0x7fffffff;
          const end = texts.indexOf(0, first);
          return new TextDecoder("utf-8", { ignoreBOM: true }).decode(texts.subarray(first, end < 0 ? undefined : end));
        }
      }
      return undefined;
    }

    const replacements = new Map(); // of single characters
    function single(char) {
      if (!replacements.has(char)) replacements.set(char, lookup(utf8.encode(char)) ?? char);
      return replacements.get(char);
    }

    return (text) => {
      const parts = [];
      clusters(text, known, (cluster) => {
        const whole = cluster.length > 1 && cluster.length < 6 ? utf8.encode(cluster.join("")) : null;
        const short = whole && whole.length < 6 ? lookup(whole) : undefined;
        if (short !== undefined) parts.push(short);
        else for (const char of cluster) parts.push(single(char));
      });
      return parts.join("");
    };
  }

  // step -> function(step, sets) that makes a function of a text.
  const normalizers = {
    unicode({ form, set }, sets) {
      const active = expression(["", set, "+"], sets);
      return (text) => text.replace(active, (run) => run.normalize(form));
    },
    lower({ set }, sets) {
      const upper = expression(["", set, ""], sets);
      return (text) => text.replace(upper, (char) => char.toLowerCase());
    },
    map({ set, content }, sets) {
      const members = expression(["", set, ""], sets);
      return (text) => text.replace(members, () => content);
    },
    around({ set }, sets) {
      const members = expression(["", set, ""], sets);
      return (text) => text.replace(members, (char) => ` ${char} `);
    },
    strip({ set, left, right }, sets) {
      const before = expression(["^", set, "+"], sets);
      const is = membership(sets[set]);
      return (text) => {
        const rest = left ? text.replace(before, "") : text;
        let end = rest.length; // white space is never made of two code units
        while (right && end > 0 && is(rest.charCodeAt(end - 1))) end--;
        return rest.slice(0, end);
      };
    },
    replace({ pattern, content }, sets) {
      const matches = expression(pattern, sets);
      return (text) => text.replace(matches, () => content);
    },
    prepend: ({ content }) => (text) => (text ? content + text : text),
    charsmap: ({ table, classes }, sets) => charsmap(table, properties(classes, sets)),
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

  // What becomes of the matches, by the names of the library.
  const behaviors = {
    Isolated: (pieces) => pieces,
    Removed: (pieces) => pieces.filter(([, , match]) => !match),
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
    metaspace({ mark, scheme, split }) {
      const marks = new RegExp(escaped(mark.codePointAt(0)), "gu");
      return (piece) => {
        let text = piece.text.replaceAll(" ", () => mark);
        if (!text.startsWith(mark) && (scheme === "always" || (scheme === "first" && piece.first))) text = mark + text;
        return split ? parts({ ...piece, text }, marks, "MergedWithNext", false) : [{ ...piece, text }];
      };
    },
  };

  return { byteOfLetter, expression, membership, normalizers, splitters, utf8 };
})();
