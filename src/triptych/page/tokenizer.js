// The tokenizer of a page: texts to token ids and back, with the ids of the Python library.
//
//   const tokenizer = Tokenizer.from(data);  // what `triptych.page.tokenizer_data` returns
//   tokenizer.encode("a text")               // ids, with the special tokens that a model's input has
//   tokenizer.decode(ids)                    // the text, without special tokens
//   tokenizer.pieces(ids)                    // a readable name of each token
//
// A half of a surrogate pair, which has no UTF-8, is read as U+FFFD; Python refuses such a text.

class Tokenizer {
  static from(data) {
    return new Tokenizer(data);
  }

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
      if (!letters.includes(undefined)) return Tokenizer.visible(Tokenizer.escapedBytes(Uint8Array.from(letters)));
      return Tokenizer.visible(!bytes && marks ? token.replaceAll("▁", " ") : token);
    });
  }

  static visible(text) {
    const shown = { " ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍" };
    return text.replace(/[ \n\t\r]/g, (char) => shown[char]);
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
