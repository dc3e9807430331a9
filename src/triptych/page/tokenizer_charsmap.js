// The normalizer of SentencePiece models: a compiled table of replacements, looked up by grapheme clusters.

// What a code point of Hangul can be joined by: the first, middle or last sounds of a syllable.
const SOUNDS =
  { L: /[\u1100-\u115f\ua960-\ua97c]/, V: /[\u1160-\u11a7\ud7b0-\ud7c6]/, T: /[\u11a8-\u11ff\ud7cb-\ud7fb]/ };
const isSyllable = (code) => code >= 0xac00 && code < 0xd7a4;
function hangulOf(code) {
  if (isSyllable(code)) return (code - 0xac00) % 28 ? "T" : "V";
  return Object.keys(SOUNDS).find((part) => SOUNDS[part].test(String.fromCodePoint(code))) ?? "";
}

// Where grapheme clusters end (Unicode, UAX 29), as far as clusters of up to 5 bytes need it: pairs of regional
// indicators are left out, because one has 4 bytes.  Calls `act` with the characters of each cluster.
function clusters(text, known, act) {
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
    else if (last.hangul && now.hangul) joined = now.syllable ? last.hangul === "L"
      : "LL LV LT VV VT TT".includes(last.hangul + now.hangul);
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

normalizers.charsmap = ({ table, classes }, sets) => {
  const tests = classes.map((name) => [name, membership(sets[name])]);
  const seen = new Map(); // what decides about clusters, of each code point, because texts repeat their characters
  return charsmap(table, (code) => {
    if (!seen.has(code)) {
      const facts = tests.map(([name, test]) => [name, test(code)]);
      seen.set(code, { code, hangul: hangulOf(code), syllable: isSyllable(code), ...Object.fromEntries(facts) });
    }
    return seen.get(code);
  });
};
