// Prefix, same-document and block-sparse masks, and combinations of masks; a page carries them where its model has one.

const all = (tests, both) => (q, k) => (both ? tests.every((test) => test(q, k)) : tests.some((test) => test(q, k)));
mask("Prefix", ({ lengths }) => (q, k) => k < lengths[0]);
mask("SameDocument", () => () => true); // one text is one document
mask("BlockSparse", ({ block, local = 1, first = 0, every = 0, powers = false }) => (q, k) => {
  const [i, j] = [Math.floor(q / block), Math.floor(k / block)];
  const far = Math.abs(i - j);
  return far < local || j < first || (every > 0 && (j + 1) % every === 0) || (powers && (far & (far - 1)) === 0);
});
mask("And", ({ parts }) => all(parts.map(visible), true));
mask("Or", ({ parts }) => all(parts.map(visible), false));
