// Reuse of earlier runs of an entry: after an edit at the end of a text only the new tokens are computed, and after a
// cut in a layer nothing below that layer.

// The first step that gives something else than in `run`; the number of steps where none does.
function firstChange(entry, given, how, run) {
  const [now, was] = [how.cuts ?? new Set(), run.how.cuts ?? new Set()];
  const cuts = new Set([...now, ...was].filter((cut) => now.has(cut) !== was.has(cut)));
  const switched = ["mask", "scale"].some((key) => (how[key] === false) !== (run.how[key] === false))
    || JSON.stringify(how.painted) !== JSON.stringify(run.how.painted) || (how.patterns && !run.how.patterns);
  const other = new Set(Object.keys(given.values).filter((name) => name !== "ids"
    && given.values[name] !== run.given.values[name]));
  const changes = (step) => {
    if (Object.values(step.inputs).some((name) => other.has(name))) return true;
    if (step.op === "attend" && switched) return true;
    if (!cuts.size) return false;
    if (step.op === "attend" && [...cuts].some((cut) => cut.startsWith(`${attendPart(step)}:`))) return true;
    return cuts.has(mlpPart(step)) || Object.keys(step.inputs).some((key) => cuts.has(arrowName(run.name, step, key)));
  };
  const first = entry.instructions.findIndex(changes);
  return first < 0 ? entry.instructions.length : first;
}

// { run, step, tokens }: the values of `run` before `step` hold, or those of its first `tokens` tokens; null if none.
function whatHolds(entry, given, how, run) {
  const step = firstChange(entry, given, how, run);
  const [ids, before] = [given.values.ids?.data ?? [], run.given.values.ids?.data ?? []];
  let tokens = 0;
  while (tokens < ids.length && ids[tokens] === before[tokens]) tokens++;
  if (tokens === ids.length && ids.length === before.length && given.tokens === run.given.tokens) {
    return step ? { run, step, tokens: 0 } : null;
  }
  tokens = Math.min(tokens, ids.length - 1);
  const goesOn = tokens > 0 && step === entry.instructions.length && how.mask !== false && !how.painted
    && entry.continues;
  return goesOn ? { run, step: 0, tokens } : null;
}

// Of several earlier runs what spares the most.
function mostHeld(entry, given, how, runs) {
  const spared = (held) => (held ? held.step / entry.instructions.length + held.tokens / given.tokens : 0);
  const all = runs.filter((run) => run).map((run) => whatHolds(entry, given, how, run));
  return all.reduce((best, held) => (spared(held) > spared(best) ? held : best), null);
}

// The first `count` vectors of `before`, then those of `fresh`.
function joinRows(before, count, fresh) {
  const width = fresh.data.length / fresh.shape[0];
  const out = new fresh.data.constructor((count + fresh.shape[0]) * width);
  out.set(before.data.subarray(0, count * width));
  out.set(fresh.data, count * width);
  return valueOf([count + fresh.shape[0], ...fresh.shape.slice(1)], out);
}

// Makes of a run on the last tokens of a text one on all of it.
function joinRuns(run, { run: before, tokens }) {
  const joined = new Map(); // values that share their numbers still do
  const biases = [];
  for (const step of run.entry.instructions) {
    const [name] = step.out;
    const value = run.values.get(name);
    const [first] = run.entry.shapes[name];
    if (first === "N" || first === "M") {
      if (!joined.has(value.data)) joined.set(value.data, joinRows(before.values.get(name), tokens, value).data);
      run.values.set(name, valueOf([run.end, ...value.shape.slice(1)], joined.get(value.data)));
    } else if (first !== "S") biases.push(step);
  }
  for (const [part, own] of run.patterns) run.patterns.set(part, joinPatterns(before.patterns.get(part), own, tokens));
  run.past = 0;
  run.own(run.end);
  for (const step of biases) run.values.set(step.out[0], run.result(step)); // of positions alone, and cheap
}

// Attention weights of the first `tokens` queries, which see no more keys than before, and of the new ones.
function joinPatterns(before, own, tokens) {
  const { heads, queries, keys } = own;
  const data = new Float32Array(heads * (tokens + queries) * keys);
  const seen = Math.min(before.keys, keys);
  for (let h = 0; h < heads; h++) {
    const to = h * (tokens + queries) * keys;
    for (let t = 0; t < tokens; t++) {
      const from = (h * before.queries + t) * before.keys;
      data.set(before.data.subarray(from, from + seen), to + t * keys);
    }
    data.set(own.data.subarray(h * queries * keys, (h + 1) * queries * keys), to + tokens * keys);
  }
  return { heads, queries: tokens + queries, keys, data };
}
