// The tokenizer of the page: `Tokenizer.from(data)`, then encode(text), decode(ids) and pieces(ids).
// Kinds: single characters, whole words in lower case without accents, and the bytes of UTF-8, whose ids they are.

class Tokenizer {
  static from(data) {
    return new Tokenizer(data);
  }

  constructor(data) {
    Object.assign(this, { data, vocab: new Map(Object.entries({ ...data.vocab, ...data.added })) });
    this.texts = [];
    for (const [text, id] of this.vocab) this.texts[id] = text;
    this.added = Object.entries(data.added).sort((a, b) => b[0].length - a[0].length);
    this.special = new Set(Object.values(data.added));
  }

  encode(text) {
    const ids = [...this.data.before];
    for (let rest = text; rest; ) {
      const found = this.added.map(([token, id]) => ({ token, id, at: rest.indexOf(token) })).filter(({ at }) => at >= 0);
      const next = found.sort((a, b) => a.at - b.at || b.token.length - a.token.length)[0];
      const part = next ? rest.slice(0, next.at) : rest;
      if (this.data.kind === "bytes") ids.push(...new TextEncoder().encode(part));
      else for (const word of this.words(part)) ids.push(this.vocab.get(word) ?? this.data.unknown);
      if (next) ids.push(next.id);
      rest = next ? rest.slice(next.at + next.token.length) : "";
    }
    return [...ids.filter((id) => id !== null), ...this.data.after];
  }

  words(text) {
    if (this.data.kind === "characters") return [...text];
    const plain = text.normalize("NFD").replace(/\p{Mn}/gu, "").toLowerCase();
    return plain.match(/[^\s\p{P}$+<=>^`|~]+|[\p{P}$+<=>^`|~]/gu) ?? [];
  }

  decode(ids) {
    if (this.data.kind === "bytes") return new TextDecoder().decode(Uint8Array.from(ids.filter((id) => id < 256)));
    const words = ids.filter((id) => !this.special.has(id)).map((id) => this.texts[id] ?? "");
    return words.join(this.data.kind === "characters" ? "" : " ");
  }

  pieces(ids) {
    return ids.map((id) => this.texts[id] ?? String(id));
  }
}
