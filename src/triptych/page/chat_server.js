// The server that the page comes from: its models, and answers as they are written.

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

class ChatServer {
  key = ""; // in memory alone: it ends with the page

  // Raises Refused with the server's own words, status 0 where nobody answers.
  async ask(path, body, signal) {
    const headers = this.key ? { authorization: `Bearer ${this.key}` } : {};
    if (body) headers["content-type"] = "application/json";
    let response;
    try {
      const method = body ? "POST" : "GET";
      response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused(0, "The server does not answer. See whether it still runs.");
    }
    if (response.ok) return response;
    const answer = await response.json().catch(() => null);
    throw new Refused(response.status, answer?.error?.message ?? `The server answered ${response.status}.`);
  }

  async models() {
    return (await (await this.ask("v1/models")).json()).data.map(({ id }) => id);
  }

  // One forward of a conversation, with what /v1/inspect reads in it.
  async inspect(body) {
    return (await this.ask("v1/inspect", body)).json();
  }

  // Bytes of memory that the process of the server holds; null where it does not know.
  async memory() {
    return (await (await this.ask("health")).json()).resident_bytes ?? null;
  }

  // The events of an answer as they come: server-sent events with JSON (HTML standard, 9.2), the last of them [DONE].
  async *stream(body, signal) {
    const response = await this.ask("v1/chat/completions", { ...body, stream: true }, signal);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { value, done } = await reader.read();
      if (done) throw new Refused(0, "The answer ended early. See whether the server still runs.");
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Refused(500, chunk.error.message);
        yield chunk;
      }
    }
  }
}
