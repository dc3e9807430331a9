// A mask painted by hand: `rule` is "own" (that of the model), "all" or "causal", `hidden` are keys that no query sees,
// and `flips` single cells (query * PAINTED + key) that are the other way round.

const PAINTED = 1024; // more than a text has tokens
const asItWas = () => ({ rule: "own", hidden: [], flips: [] });
const isPainted = ({ rule, hidden, flips }) => rule !== "own" || hidden.length > 0 || flips.length > 0;

// Whether query t sees key s; `own` is the mask that is painted over.
function paintedMask({ rule, hidden, flips }, own) {
  const base = { own, all: () => true, causal: (t, s) => s <= t }[rule];
  const [away, turned] = [new Set(hidden), new Set(flips)];
  return (t, s) => (base(t, s) && !away.has(s)) !== turned.has(t * PAINTED + s);
}

const toggled = (list, value) => (list.includes(value) ? list.filter((one) => one !== value) : [...list, value]);
