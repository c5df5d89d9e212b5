// The turns of a conversation: what the user asked, an answer with the colours and figures of its steps, and the tree of
// a step. Texts become text nodes and never markup.

// One turn of the conversation. name: whose it is, for those who hear the page.
function newTurn(kind, name) {
  const block = add(log, "article", "", kind);
  add(block, "h2", name, "unseen");
  return block;
}

function actions(block) {
  return add(block, "div", "", "actions soft");
}

function action(place, name, deed) {
  const button = add(place, "button", name, name.toLowerCase());
  button.type = "button";
  button.onclick = deed;
}

function userTurn(text) {
  const block = newTurn("asked", "You");
  add(block, "div", text, about.chat_template ? "user" : "user code");
  action(actions(block), "Edit", () => edit(turns.indexOf(block)));
  return block;
}

class Answer {
  constructor() {
    this.block = newTurn("answer", "Model");
    this.mind = add(this.block, "details", "", "soft");
    this.mind.hidden = true;
    add(this.mind, "summary", "Thought");
    this.thought = add(this.mind, "div", "", "thought");
    this.text = add(this.block, "div", "", about.chat_template ? "text markdown" : "text code");
    this.figures = add(this.block, "p", "waiting for the server", "figures soft");
    this.steps = [];
    this.pieces = [];  // {text, start, step, kind} of each token; step -1: none
    this.written = [];  // [text, step, kind] of the tokens that are not shown yet
    this.source = "";  // what is shown: the texts of the pieces
    this.content = this.end = this.scores = "";
    this.timings = null;
    this.later = 0;
    this.places = actions(this.block);
    copyButton(this.places, () => this.content);
    action(this.places, "Regenerate", () => regenerate(turns.indexOf(this.block)));
  }

  // What the browser keeps of it: its text, and how many characters have which colour.
  message() {
    const tints = [];
    for (const {text, kind} of this.pieces) {
      const tint = kind.replace("token ", "");
      if (tints.at(-1)?.[1] == tint) tints.at(-1)[0] += text.length;
      else tints.push([text.length, tint]);
    }
    const coloured = this.source == this.content && tints.some(([, tint]) => tint);
    const thought = this.thought.textContent;
    return {role: "assistant", content: this.content, ...coloured && {tints}, ...thought && {thought}};
  }

  // Shows a message that was kept. Its trees are not there any more.
  whole({content, tints = [], thought}) {
    this.think(thought);
    this.content = content;
    for (const [length, tint] of tints) {
      this.piece(content.slice(this.source.length, this.source.length + length), -1, tint);
      if (tint > "d0") part("legend").hidden = false;
    }
    this.piece(content.slice(this.source.length), -1, "");
    this.draw();
    this.figures.hidden = true;
    return this;
  }

  take(chunk) {
    const choice = chunk.choices[0];
    const text = choice.delta ? choice.delta.content || "" : choice.text;
    this.content += text;
    this.end = choice.finish_reason || this.end;
    this.timings = chunk.timings || this.timings;
    this.think(choice.delta?.reasoning_content);
    if (chunk.first !== undefined) {
      this.scores = chunk.scores;
      this.written.push([chunk.first, -1, "d0"]);
    }
    chunk.steps?.forEach(step => this.step(step));
    this.place(text);
    this.later ||= setTimeout(() => growing(() => this.draw()), 40);
  }

  think(text) {
    if (!text) return;
    this.mind.hidden = false;
    this.thought.append(text);
  }

  step(step) {
    const number = this.steps.push(step) - 1;
    step.kept.forEach((token, j) => this.written.push([token, number, `token ${tintOf(step, j)}`]));
    if (step.nodes.some(isDrafted)) part("legend").hidden = false;
    if (chosen?.answer == this) describe();
  }

  // Shows more of the text in the colours of its tokens. Tokens before it are marks, or belong to a thought or a call.
  place(text) {
    let skip = this.written.map(([token]) => token).join("").indexOf(text), left = text.length;
    if (skip < 0) return this.piece(text, -1, "");
    while (left) {
      const [token, step, kind] = this.written.shift();
      const part = token.slice(skip, skip + left), rest = token.slice(skip + left);
      this.piece(part, step, kind);
      if (rest) this.written.unshift([rest, step, kind]);
      skip = Math.max(0, skip - token.length);
      left -= part.length;
    }
  }

  piece(text, step, kind) {
    if (text) this.pieces.push({text, start: this.source.length, step, kind});
    this.source += text;
  }

  // Shows what has come. Pieces that are shown already stay as they are.
  draw() {
    clearTimeout(this.later);
    this.later = 0;
    if (about.chat_template) drawMarkdown(this.text, this.source, (place, text, from) => this.write(place, text, from));
    else {
      this.write(this.text, this.source.slice(this.shown || 0), this.shown || 0);
      this.shown = this.source.length;
    }
    if (!this.text.querySelector("[tabindex='0'].token")) this.text.querySelector(".token")?.setAttribute("tabindex", 0);
    this.count();
  }

  // Adds a text, which stands in the source at `from` or behind it, in the colours of its pieces. Returns where it ends.
  write(place, text, from) {
    const whole = this.source.indexOf(text, from);
    let owner = null, run = "", at = from;
    const flush = () => {
      if (run) place.append(owner?.kind ? this.span(owner, run) : run);
      run = "";
    };
    for (let i = 0; i < text.length; i++) {
      const next = whole < 0 ? this.source.slice(at, at + 200).indexOf(text[i]) : 0;  // references stand for characters
      at = whole < 0 ? at + Math.max(next, 0) : whole + i;
      const piece = this.pieceAt(at);
      if (piece != owner) flush();
      owner = piece;
      run += text[i];
      at += next >= 0;
    }
    flush();
    return at;
  }

  pieceAt(offset) {
    let low = 0, high = this.pieces.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.pieces[middle].start <= offset) low = middle;
      else high = middle;
    }
    return this.pieces[low];
  }

  span(piece, text) {
    const span = document.createElement("span");
    span.textContent = text;
    span.className = piece.kind;
    if (piece.step < 0) return span;
    span.at = [this, piece.step];
    span.dataset.step = piece.step;
    span.tabIndex = -1;  // the arrow keys go on from the first one
    span.classList.toggle("on", chosen?.answer == this && chosen.number == piece.step);
    return span;
  }

  // The elements of a step. There are none where all of its text is Markdown's own.
  spans(number) {
    return [...this.text.querySelectorAll(`[data-step="${number}"]`)];
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
    if (t?.dropped_messages) facts.push(`${t.dropped_messages} old messages were left out`);
    const ends = {length: this.isFull() ? "the context is full" : "the token limit is reached", stopped: "stopped"};
    if (ends[this.end]) facts.push(ends[this.end]);
    this.figures.textContent = facts.join("  \u00b7  ") || "answering";
  }

  isFull() {
    const t = this.timings;
    return this.end == "length" && t && t.cache_n + t.prompt_n + t.predicted_n >= about.max_model_len;
  }
}

// ---------------------------------------------------------------- the tree of a step

function choose(answer, number) {
  if (!answer.steps[number]) return;
  if (!chosen) clear();
  mark(false);
  chosen = {answer, number};
  mark(true);
  part("panel").hidden = false;
  part("tree").replaceChildren(drawTree(answer.steps[number]));
  part("scores").textContent = answer.scores;
  describe();
  answer.spans(number).at(-1)?.scrollIntoView({block: "nearest"});
}

function mark(on) {
  chosen?.answer.spans(chosen.number).forEach(span => span.classList.toggle("on", on));
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
  mark(false);
  chosen = null;
  part("panel").hidden = true;
  if (inside) answer.spans(number)[0]?.focus({preventScroll: true});
}
