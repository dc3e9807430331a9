// A button that opens or closes all steps at once; printing opens them.

mounts.steps = (section, node) => {
  const steps = [...node.querySelectorAll("details")];
  const toggle = button("", "", () => {
    const open = steps.some((step) => !step.open);
    steps.forEach((step) => (step.open = open));
  });
  const tell = () => (toggle.textContent = steps.some((step) => !step.open) ? "Open all" : "Close all");
  steps.forEach((step) => step.addEventListener("toggle", tell));
  tell();
  node.querySelector("h2, h3").append(toggle);
  addEventListener("beforeprint", () => steps.forEach((step) => (step.open = true)));
};
