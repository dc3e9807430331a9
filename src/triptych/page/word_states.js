// One word in many sentences, layer by layer, in a pretrained model (tools/word_states.py): what was measured, and the
// points to move through the layers.

function wordPlane(states) {
  const place = div("plane-of-words");
  new PlaneView({ ...states, title: "One word in many sentences" }, place);
  return place;
}

// What the points show, beside the control, in words with the numbers of the file.
function wordText({ model, stacks }) {
  const of = (name) => stacks.find(({ stack }) => stack === name);
  const mean = ([, ...blocks]) => blocks.reduce((sum, x) => sum + x, 0) / blocks.length; // all but the embedding
  const share = (name, values) => number(name, mean(values), percent(mean(values)));
  const [bank, cut, table] = ["bank", "bank, deciding word cut", "table"].map(of);
  const [own, control] = [bank, table].map(({ between, chance }) => mean(between) - mean(chance));
  const verdict = control >= 0.8 * own ? "as much, so the picture shows the topic of a sentence and no two meanings"
    : "less, so the topic of a sentence explains only a part of it";
  return prose`“bank” enters ${model} as one vector, whatever stands around it. The picture follows it through the
    blocks in ${count("sentences", bank.tokens.length)} sentences about water or money, each named by its deciding word.
    Of the variance of these vectors, ${share("between", bank.between)} lies between the two topics, as a mean of all
    blocks (random groups: ${share("chance", bank.chance)}). If “bank” cannot attend to the deciding word,
    ${share("cut", cut.between)}. The control “table”, with one meaning, has ${share("control", table.between)}:
    ${verdict}. The plane shows ${share("shown", bank.share)} of the variance of “bank”.`;
}

mounts.wordstates = ({ states }, place) =>
  place.append(el("p", { class: "walk-text" }, wordText(states)), wordPlane(states));
