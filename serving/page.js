%drawings.js%
// The chat. Texts of the user and of the model become text nodes and never markup.
"use strict";
const log = part("log"), box = part("box");
const KEY = "eaglet-key";  // the API key stays in this tab
let messages = [], running = null, about = {}, chosen = null;

// Does something that makes the conversation longer, and stays at its end if that was in sight.
function growing(work) {
  const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  work();
  if (follow) log.scrollTop = log.scrollHeight;
}

// ---------------------------------------------------------------- the server

async function call(path, more = {}) {
  const key = sessionStorage.getItem(KEY), headers = {"Content-Type": "application/json"};
  if (key) headers.Authorization = `Bearer ${key}`;
  const answer = await fetch(path, {...more, headers});
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw Object.assign(new Error(body.error?.message || `the server answers with status ${answer.status}`),
    {status: answer.status});
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const blocks = (held + value).split("\n\n");
    held = blocks.pop();
    for (const block of blocks) if (block.startsWith("data: {")) yield JSON.parse(block.slice(6));
  }
}

// What is sent for a list of messages. A model without a chat template goes on with their text.
function request(asked) {
  const body = {model: about.id, stream: true, eaglet: {steps: part("watch").checked}};
  const most = part("most").valueAsNumber || about.max_model_len;
  const given = {temperature: part("temperature").valueAsNumber, seed: part("seed").valueAsNumber, max_tokens: most};
  for (const [name, value] of Object.entries(given)) if (!Number.isNaN(value)) body[name] = value;
  if (about.chat_template) return ["/v1/chat/completions", {...body, messages: asked}];
  return ["/v1/completions", {...body, prompt: asked.map(message => message.content).join("")}];
}

// ---------------------------------------------------------------- an answer

class Answer {
  constructor() {
    this.block = add(log, "article", "", "answer");
    this.text = add(this.block, "div", "", about.chat_template ? "text" : "text code");
    this.figures = add(this.block, "p", "waiting for the server", "figures soft");
    this.steps = [];
    this.pieces = [];  // the elements of each step's tokens
    this.content = this.end = this.scores = "";
    this.timings = null;
  }

  take(chunk) {
    const choice = chunk.choices[0];
    const text = choice.delta ? choice.delta.content || "" : choice.text;
    this.content += text;
    this.end = choice.finish_reason || this.end;
    this.timings = chunk.timings || this.timings;
    if (chunk.first !== undefined) {
      this.scores = chunk.scores;
      add(this.text, "span", chunk.first, "d0");
    }
    if (chunk.steps) chunk.steps.forEach(step => this.step(step));
    else this.text.append(text);
    this.count();
  }

  step(step) {
    const number = this.steps.push(step) - 1;
    this.pieces.push(step.kept.map((token, j) => {
      const piece = add(this.text, "span", token, `token ${tintOf(step, j)}`);
      piece.at = [this, number];
      piece.tabIndex = number || j ? -1 : 0;  // the arrow keys go on from the first one
      return piece;
    }));
    if (step.nodes.some(isDrafted)) part("legend").hidden = false;
    if (chosen?.answer == this) describe();
  }

  // The figures so far, or those of the server once it has sent them.
  count() {
    const t = this.timings, sum = values => values.reduce((a, b) => a + b, 0);
    const drafted = this.steps.filter(step => step.nodes.some(isDrafted));
    const lengths = steps => sum(steps.map(step => step.kept.length));
    const tokens = t ? t.predicted_n : this.steps.length ? 1 + lengths(this.steps) : 0;
    const rate = t ? t.predicted_per_second : 1000 * (tokens - 1) / sum(this.steps.map(step => step.ms));
    const tau = t ? t.tau : lengths(drafted) / drafted.length;
    const facts = tokens ? [`${tokens} tokens`] : [];
    if (rate > 0) facts.push(`${rate.toFixed(1)} tokens/s`);
    if (tau > 0) facts.push(`tau ${tau.toFixed(2)}`);
    if (t) facts.push(`${t.cache_n} of ${t.cache_n + t.prompt_n} prompt tokens cached`, `seed ${t.seed}`);
    const ends = {length: "the token limit is reached", stopped: "stopped"};
    if (ends[this.end]) facts.push(ends[this.end]);
    this.figures.textContent = facts.join("  \u00b7  ") || "answering";
  }
}

async function answer(text) {
  const history = messages, asked = [...history, {role: "user", content: text}];
  const controller = running = new AbortController();
  part("hello").hidden = true;
  add(log, "div", text, about.chat_template ? "user" : "user code");
  const made = new Answer();
  log.scrollTop = log.scrollHeight;
  busy(true, "answering");
  try {
    const [path, body] = request(asked);
    const response = await call(path, {method: "POST", body: JSON.stringify(body), signal: controller.signal});
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      growing(() => made.take(chunk));
    }
    if (!made.end) throw new Error("the connection ended before the answer did");
  } catch (error) {
    made.end = made.end || "stopped";
    if (error.name != "AbortError") growing(() => { add(made.block, "p", `error: ${error.message}`, "error").role = "alert"; });
    if (error.status == 401) part("login").hidden = false;
    if (!made.content && !box.value && history == messages) box.value = text;
  }
  growing(() => made.count());
  if (made.content) history.push(asked.at(-1), {role: "assistant", content: made.content});
  if (running == controller) {
    running = null;
    busy(false, `The answer has ended: ${made.figures.textContent}`);
  }
}

function busy(now, status) {
  part("send").hidden = now;
  part("stop").hidden = !now;
  part("status").textContent = status;
}

// ---------------------------------------------------------------- the tree of a step

function choose(answer, number) {
  if (!answer.steps[number]) return;
  const before = chosen;
  before?.answer.pieces[before.number].forEach(piece => piece.classList.remove("on"));
  chosen = {answer, number};
  answer.pieces[number].forEach(piece => piece.classList.add("on"));
  part("panel").hidden = false;
  part("tree").replaceChildren(drawTree(answer.steps[number]));
  part("scores").textContent = answer.scores;
  describe();
  answer.pieces[number].at(-1).scrollIntoView({block: "nearest"});
}

function describe() {
  const {answer, number} = chosen, count = answer.steps.length;
  part("where").textContent = `Step ${number + 1} of ${count}: ${inWords(answer.steps[number])}`;
  part("prev").disabled = number == 0;
  part("next").disabled = number == count - 1;
}

const move = by => chosen && choose(chosen.answer, chosen.number + by);

function shut() {
  if (!chosen) return;
  const {answer, number} = chosen, inside = part("panel").contains(document.activeElement);
  answer.pieces[number].forEach(piece => piece.classList.remove("on"));
  chosen = null;
  part("panel").hidden = true;
  if (inside) answer.pieces[number][0].focus({preventScroll: true});
}

// ---------------------------------------------------------------- what the user does

log.onclick = event => event.target.at && choose(...event.target.at);
log.addEventListener("focusin", event => {
  if (event.target.at && event.target.matches(":focus-visible")) choose(...event.target.at);
});
log.onkeydown = event => {
  const by = {ArrowLeft: -1, ArrowRight: 1}[event.key], from = event.target.at;
  if (!by || !from) return;
  const all = from[0].pieces.flat().filter(piece => piece.textContent);
  const to = all[all.indexOf(event.target) + by];
  if (!to) return;
  event.preventDefault();
  event.target.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
};
part("prev").onclick = () => move(-1);
part("next").onclick = () => move(1);
part("close").onclick = shut;
part("tree").onkeydown = part("prev").onkeydown = part("next").onkeydown = event => {
  const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (by) move(by);
};
document.addEventListener("keydown", event => { if (event.key == "Escape") shut(); });

function fit() {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}
box.oninput = fit;
box.onkeydown = event => {
  if (event.key != "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  part("ask").requestSubmit();
};
part("ask").onsubmit = event => {
  event.preventDefault();
  const text = box.value;
  if (running || !text.trim()) return;
  box.value = "";
  answer(text).finally(fit);
  fit();
};
part("stop").onclick = () => {
  running?.abort();
  box.focus();
};
part("new").onclick = () => {
  running?.abort();
  running = null;
  shut();
  messages = [];
  log.replaceChildren(part("hello"));
  part("hello").hidden = false;
  part("legend").hidden = true;
  busy(false, "a new chat");
  box.focus();
};
part("gear").onclick = () => {
  part("settings").hidden = !part("settings").hidden;
  part("gear").setAttribute("aria-expanded", !part("settings").hidden);
};
part("login").onsubmit = event => {
  event.preventDefault();
  sessionStorage.setItem(KEY, part("key").value);
  start();
};

async function start() {
  try {
    about = (await (await call("/v1/models")).json()).data[0];
    part("model").textContent = part("model").title = about.id;
    part("hello").textContent = about.chat_template ? "Ask something. Then choose a word to see the tree of its step."
      : "This model has no chat template, so it goes on with your text. Choose a word to see the tree of its step.";
    part("login").hidden = true;
    part("ask").hidden = false;
    box.focus();
  } catch (error) {
    part("ask").hidden = true;
    part("login").hidden = error.status != 401;
    const asks = error.status == 401 && !sessionStorage.getItem(KEY);
    part("hello").textContent = asks ? "" : `error: ${error.message}`;
    if (error.status == 401) part("key").focus();
  }
}
start();
