// What a conversation is asked with: the model, how tokens are chosen, and the system prompt.

const number = (name, attributes) => {
  const input = el("input", { type: "number", step: 1, "aria-label": name, autocomplete: "off", ...attributes });
  return { input, node: el("label", { class: "number-field" }, name, input) };
};

class ChatSettings {
  constructor() {
    this.model = el("select", { "aria-label": "Model" });
    this.temperature = slider("Temperature", { min: 0, max: 2, step: 0.05, value: 0.7 }, () => {});
    this.top = slider("Top-p", { min: 0.05, max: 1, step: 0.05, value: 0.95 }, () => {});
    this.most = number("Most tokens", { min: 1, value: 512 });
    this.seed = number("Seed", { min: 0, max: Number.MAX_SAFE_INTEGER, placeholder: "random" });
    this.system = el("textarea", { rows: 2, "aria-label": "System prompt" });
    this.node = el("details", { class: "settings", open: "" }, el("summary", {}, "Settings"),
      el("label", { class: "field" }, el("span", {}, "Model"), this.model),
      this.temperature.node, this.top.node, this.most.node, this.seed.node,
      el("label", { class: "field" }, el("span", {}, "System prompt"), this.system));
    if (innerWidth < 800) this.node.removeAttribute("open");
  }

  offer(models) {
    const before = this.model.value;
    refill(this.model, models.map((name) => el("option", { value: name }, name)));
    if (models.includes(before)) this.model.value = before;
  }

  // What is wrong with a number, or the empty text.
  problem() {
    const wrong = [this.most, this.seed].find(({ input }) => !input.checkValidity());
    return wrong ? `${wrong.input.getAttribute("aria-label")}: ${wrong.input.validationMessage}` : "";
  }

  // The fields of a request for an answer to these turns.
  body(turns) {
    const system = this.system.value.trim() ? [{ role: "system", content: this.system.value }] : [];
    const fields = { model: this.model.value, messages: [...system, ...turns], logprobs: true, top_logprobs: 8,
      temperature: Number(this.temperature.input.value), top_p: Number(this.top.input.value) };
    if (this.most.input.value) fields.max_tokens = Number(this.most.input.value);
    if (this.seed.input.value) fields.seed = Number(this.seed.input.value);
    return fields;
  }
}
