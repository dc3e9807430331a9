// The decoders Metaspace, ByteFallback, Strip, Replace and BPEDecoder, which few tokenizers but SentencePiece's have.

Object.assign(Tokenizer.decoders, {
  Metaspace: ({ replacement, prepend_scheme }) => (tokens) =>
    tokens.map((token, i) => token.replaceAll(replacement, i === 0 && prepend_scheme !== "never" ? "" : " ")),
  ByteFallback: () => (tokens) => {
    const texts = [];
    let bytes = [];
    const flush = () => {
      if (!bytes.length) return;
      const text = textOf(Uint8Array.from(bytes));
      texts.push(...(text === null ? bytes.map(() => "\ufffd") : [text]));
      bytes = [];
    };
    for (const token of tokens) {
      const byte = /^<0x([0-9a-f]{2}|\+[0-9a-f])>$/i.exec(token);
      if (byte) bytes.push(parseInt(byte[1], 16));
      else {
        flush();
        texts.push(token);
      }
    }
    flush();
    return texts;
  },
  Strip({ content, start, stop }) {
    const one = escaped(content.codePointAt(0));
    const [before, behind] = [new RegExp(`^${one}{0,${start}}`, "u"), new RegExp(`${one}{0,${stop}}$`, "u")];
    return (tokens) => tokens.map((token) => token.replace(before, "").replace(behind, ""));
  },
  Replace(step, sets) {
    const replace = normalizers.replace(step, sets);
    return (tokens) => tokens.map(replace);
  },
  BPEDecoder: ({ suffix }) => (tokens) =>
    tokens.map((token, i) => token.replaceAll(suffix, () => (i === tokens.length - 1 ? "" : " "))),
});
