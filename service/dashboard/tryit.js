// The try-it box: streams a completion and colours each token by where it came from.

const form = document.getElementById("try");
const output = document.getElementById("output");
const told = document.getElementById("told");
const go = document.getElementById("go");
let running = null;

/** Events of a server-sent stream, decoded; ends at [DONE]. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The stream ended before the answer was complete.");
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

/** Show `text` cut at the tokens' offsets (in characters, not UTF-16 units). */
function show(text, tokens) {
  const characters = Array.from(text);
  output.replaceChildren(
    ...tokens.map(({ offset, accepted }, i) => {
      const span = document.createElement("span");
      span.className = accepted ? "accepted" : "target";
      span.textContent = characters.slice(offset, tokens[i + 1]?.offset).join("");
      return span;
    }),
  );
}

function summary(chunk) {
  const spec = chunk.metrics.speculative_decoding;
  const count = `${chunk.usage.completion_tokens} tokens`;
  if (!spec) return `${count}, without speculation`;
  const length = spec.mean_acceptance_length.toFixed(2);
  return `${count} in ${spec.num_spec_steps} speculative steps, ${length} per step; ` +
    `${spec.num_accepted_draft_tokens} of ${spec.num_draft_tokens} drafts accepted`;
}

async function complete(url, model) {
  const body = {
    model,
    prompt: document.getElementById("prompt").value,
    max_tokens: Number(document.getElementById("max-tokens").value),
    temperature: Number(document.getElementById("temperature").value),
    stream: true,
    stream_options: { include_usage: true },
    return_token_ids: true,
    logprobs: 0,
  };
  const response = await fetch(url, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal: running.signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  let text = "";
  const tokens = [];
  for await (const chunk of events(response.body)) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.metrics) told.textContent = summary(chunk);
    for (const choice of chunk.choices) {
      text += choice.text;
      const offsets = choice.logprobs?.text_offset ?? [];
      offsets.forEach((offset, i) => tokens.push({ offset, accepted: i < choice.num_accepted_tokens }));
    }
    show(text, tokens);
  }
}

/** Make the form work: `url` of the completions endpoint, `model` a function that gives the served name. */
export function connect(url, model) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) {
      running.abort();
      return;
    }
    running = new AbortController();
    go.textContent = "Stop";
    told.textContent = "";
    output.replaceChildren();
    try {
      await complete(url, model());
    } catch (error) {
      told.textContent = error.name === "AbortError" ? "Stopped." : error.message;
    } finally {
      running = null;
      go.textContent = "Complete";
    }
  });
}
