%drawings.js%
%markdown.js%
%answer.js%
// The chat. Texts of the user and of the model become text nodes and never markup.
"use strict";
const log = part("log"), box = part("box");
const KEY = "eaglet-key";  // the API key stays in this tab
const OPEN = "eaglet-open";  // the chat that this tab shows
const CHATS = "eaglet-chats", SETTINGS = "eaglet-settings";  // kept in the browser
const MOST_CHATS = 50, MOST_CHARACTERS = 1000000;
const GONE = "The server does not answer. Your text is back in the field; send it again when the server runs.";
let chat = newChat(), turns = [], running = null, about = {}, chosen = null;
let edited = null;  // the message that the text in the field will replace

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
    {status: answer.status, code: body.error?.code});
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
function request(asked, again) {
  const body = {model: about.id, stream: true, eaglet: {steps: part("watch").checked}};
  const most = part("most").valueAsNumber || about.max_model_len, seed = again ? NaN : part("seed").valueAsNumber;
  const given = {temperature: part("temperature").valueAsNumber, seed, max_tokens: most};
  for (const [name, value] of Object.entries(given)) if (!Number.isNaN(value)) body[name] = value;
  const system = part("system").value.trim() ? [{role: "system", content: part("system").value}] : [];
  if (about.chat_template) return ["/v1/chat/completions", {...body, messages: [...system, ...asked.map(({role, content}) => ({role, content}))]}];
  return ["/v1/completions", {...body, prompt: asked.map(message => message.content).join("")}];
}

// ---------------------------------------------------------------- what the browser keeps

function newChat() {
  return {id: crypto.getRandomValues(new Uint32Array(2)).join("-"), messages: []};
}

// What is kept under a name. A browser may refuse to keep anything.
function recalled(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) || otherwise;
  } catch {
    return otherwise;
  }
}

// The chats that are kept, the newest first.
function kept() {
  const list = recalled(CHATS, []);
  return Array.isArray(list) ? list.filter(one => one && typeof one.id == "string" && Array.isArray(one.messages)) : [];
}

// Keeps these chats, without the oldest ones if there are too many.
function keep(chats) {
  for (const list = chats.slice(0, MOST_CHATS); list.length; list.pop()) {
    const text = JSON.stringify(list);
    try {
      if (text.length <= MOST_CHARACTERS) return localStorage.setItem(CHATS, text);
    } catch {
      continue;  // the browser has less room
    }
  }
  try {
    localStorage.removeItem(CHATS);
  } catch { /* nothing was kept */ }
}

const keepChat = one => one.deleted || keep([one, ...kept().filter(other => other.id != one.id)]);

function forget(ids) {
  if (ids.includes(chat.id)) {
    chat.deleted = true;
    openChat(newChat());
  }
  keep(kept().filter(one => !ids.includes(one.id)));
  list();
}

function list() {
  const all = kept(), place = part("chats");
  place.replaceChildren();
  for (const one of all) {
    const row = add(place, "div", "", "row"), title = one.messages[0]?.content || "empty";
    const name = add(row, "button", shortened(title.replace(/\s+/g, " "), 60), "name");
    const away = add(row, "button", "\u00d7");
    name.onclick = () => { show("list", "chats", false); openChat(one); };
    away.onclick = () => forget([one.id]);
    away.setAttribute("aria-label", `delete the chat ${name.textContent}`);
    if (one.id == chat.id) name.setAttribute("aria-current", "true");
  }
  add(place, "p", all.length ? "Kept in this browser only." : "No chats are kept yet.", "soft");
  if (all.length) add(place, "button", "Delete all").onclick = () => forget(all.map(one => one.id));
}

// Shows a chat instead of the one that is shown.
function openChat(other) {
  running?.abort();
  running = null;
  shut();
  say("");
  chat = other;
  edited = null;
  turns = [];
  log.replaceChildren(part("hello"));
  part("legend").hidden = true;
  for (const message of chat.messages)
    turns.push(message.role == "user" ? userTurn(message.content) : new Answer().whole(message).block);
  part("hello").hidden = turns.length > 0;
  sessionStorage.setItem(OPEN, chat.id);
  busy(false, turns.length ? "the chat is open" : "a new chat");
  log.scrollTop = log.scrollHeight;
  box.focus();
}

// ---------------------------------------------------------------- asking

// Sends a text as message number `from`, in place of that message and all behind it. If no answer begins, all is as before.
async function send(text, from, again = false) {
  const mine = chat, before = {messages: mine.messages, turns, edited};
  const asked = [...mine.messages.slice(0, from), {role: "user", content: text}];
  const controller = running = new AbortController();
  shut();
  say("");
  edited = null;
  part("hello").hidden = true;
  turns.slice(from).forEach(turn => turn.remove());
  turns = [...turns.slice(0, from), userTurn(text)];
  const made = new Answer(), shown = turns = [...turns, made.block];
  log.scrollTop = log.scrollHeight;
  busy(true, "answering");
  let failure = null;
  try {
    const [path, body] = request(asked, again);
    const response = await call(path, {method: "POST", body: JSON.stringify(body), signal: controller.signal});
    for await (const chunk of events(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      made.take(chunk);
    }
    if (!made.end) throw new Error("the connection ended before the answer did");
  } catch (error) {
    made.end = made.end || "stopped";
    failure = error;
  }
  growing(() => made.draw());
  if (made.content) {
    mine.messages = [...asked, made.message()];
    keepChat(mine);
  }
  if (running != controller) return;  // another chat is shown
  running = null;
  busy(false, `The answer has ended: ${made.figures.textContent}`);
  if (!made.content && failure) {
    turns = before.turns;
    edited = before.edited;
    shown.forEach(turn => turn.remove());
    log.append(...turns);
    part("hello").hidden = turns.length > 0;
    if (!again && !box.value) box.value = text;
  }
  report(failure, made);
}

// Says what went wrong with an answer, and what can be done.
function report(failure, made) {
  if (failure?.status == 401) part("login").hidden = false;
  if (failure?.code == "context_length_exceeded" || made.isFull())
    say(failure?.message || "The context is full.", "Start a new chat", () => another(box.value));
  else if (failure instanceof TypeError && !made.content) say(GONE);
  else if (failure && failure.name != "AbortError")
    say(failure instanceof TypeError ? "The server went away in the middle of the answer." : `error: ${failure.message}`);
}

// Says something above the field, in place of what was said before. name, deed: of a button.
function say(text, name = "", deed = null) {
  part("notice").textContent = text;
  part("notice").hidden = !text;
  if (name) action(part("notice"), name, deed);
}

function regenerate(number) {
  if (!running) send(chat.messages[number - 1].content, number - 1, true);
}

function edit(number) {
  if (running) return;
  edited = number;
  box.value = turns[number].querySelector(".user").textContent;
  say("What you send replaces this message and all behind it.", "Cancel", () => {
    edited = null;
    box.value = "";
    say("");
    fit();
    box.focus();
  });
  fit();
  box.focus();
}

function busy(now, status) {
  part("send").hidden = now;
  part("stop").hidden = !now;
  part("status").textContent = status;
  log.classList.toggle("busy", now);
}

// ---------------------------------------------------------------- what the user does

log.onclick = event => event.target.at && choose(...event.target.at);
log.addEventListener("focusin", event => {
  if (event.target.at && event.target.matches(":focus-visible")) choose(...event.target.at);
});
log.onkeydown = event => {
  const by = {ArrowLeft: -1, ArrowRight: 1}[event.key], from = event.target.at;
  if (!by || !from) return;
  const all = [...from[0].text.querySelectorAll(".token")];
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
  send(text, edited ?? chat.messages.length).finally(fit);
  fit();
};
part("stop").onclick = () => {
  running?.abort();
  box.focus();
};

// Starts a chat with a text in the field.
function another(text = "") {
  openChat(newChat());
  box.value = text;
  fit();
}
part("new").onclick = () => another();

// Hides what takes room from the conversation.
function clear() {
  shut();
  show("gear", "settings", false);
  show("list", "chats", false);
}

// Shows or hides what a button stands for.
function show(button, name, now = part(name).hidden) {
  if (now) clear();
  part(name).hidden = !now;
  part(button).setAttribute("aria-expanded", now);
}
part("gear").onclick = () => show("gear", "settings");
part("list").onclick = () => {
  list();
  show("list", "chats");
};

const settings = ["system", "temperature", "seed", "most", "watch"].map(part);
const valueOf = input => input.type == "checkbox" ? "checked" : "value";
part("settings").onchange = () => {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries(settings.map(one => [one.id, one[valueOf(one)]]))));
  } catch { /* they hold until the page is closed */ }
};
for (const [id, value] of Object.entries(recalled(SETTINGS, {}))) {
  const one = settings.find(one => one.id == id);
  if (one) one[valueOf(one)] = value;
}
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
    part("says").hidden = !about.chat_template;
    if (!chat.messages.length) openChat(kept().find(one => one.id == sessionStorage.getItem(OPEN)) || chat);
  } catch (error) {
    part("ask").hidden = true;
    part("login").hidden = error.status != 401;
    const asks = error.status == 401 && !sessionStorage.getItem(KEY);
    part("hello").textContent = asks ? "" : `error: ${error.message}`;
    if (error.status == 401) part("key").focus();
  }
}
start();
