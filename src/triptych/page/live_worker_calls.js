// Calls of the engine (live_engine.js), in a worker or in the page's thread; `call` promises the answer.

function workerCalls() {
  const script = `${document.getElementById("interpreter").textContent}\nserve();`;
  const worker = new Worker(URL.createObjectURL(new Blob([script], { type: "text/javascript" })));
  const waiting = new Map(); // number of a call -> what ends its promise
  let calls = 0;
  worker.onmessage = ({ data: { id, answer, problem } }) => {
    const { done, fail } = waiting.get(id);
    waiting.delete(id);
    if (problem === undefined) done(answer);
    else fail(new Error(problem));
  };
  worker.onerror = (event) => {
    event.preventDefault();
    for (const { fail } of waiting.values()) fail(new Error(event.message || "the worker ended"));
    waiting.clear();
  };
  return (call, given) => new Promise((done, fail) => {
    waiting.set(++calls, { done, fail });
    worker.postMessage({ id: calls, call, given });
  });
}

// { call, kernel, note }: the promise ends when the weights are unpacked; `note` says where the model runs.
async function startEngine({ program, tables, tensors, weights, stride, limit }) {
  const section = { program, tables, tensors, weights, stride, limit };
  try {
    const call = workerCalls();
    return { call, kernel: await call("load", section), note: "" };
  } catch {
    await new Promise((done) => setTimeout(done, 0)); // the page is shown first
    const engine = new Engine(section);
    const call = async (name, given) => engine[name](given);
    return { call, kernel: engine.kernel,
      note: " This browser starts no worker here, so the page waits for the model." };
  }
}
