// Answers as Markdown. The library only reads the text; the elements are made here, and texts become text nodes.

// Only links that leave for a named site or a mailbox are links.
const isLink = url => /^(https?:\/\/|mailto:)/i.test(url);
const markdown = markdownit({html: false, breaks: true}).disable("image");
markdown.validateLink = isLink;
const NAMES = {strong_open: "strong", em_open: "em", s_open: "s", heading_open: "h3"};

// The blocks at the top level of a text: their tokens, and a key that changes when the block has to be drawn again.
function blocksOf(source) {
  const about = {}, blocks = [];
  const starts = [0];
  for (let at = source.indexOf("\n"); at >= 0; at = source.indexOf("\n", at + 1)) starts.push(at + 1);
  for (const token of markdown.parse(source, about)) {
    if (token.level == 0 && token.nesting >= 0) blocks.push({tokens: [], lines: token.map});
    blocks.at(-1).tokens.push(token);
  }
  const links = Object.keys(about.references || {}).join();  // a definition changes earlier blocks, too
  for (const block of blocks) {
    const [from, to] = block.lines;
    block.key = [links, block.tokens[0].type, source.slice(starts[from], starts[to])].join("\n");
  }
  return {blocks, starts};
}

// Draws a text into an element. Blocks that are there already stay, so a growing text costs its last block only.
// write(parent, text, from): adds a text that stands in the source at `from` or behind it, and returns where it ends.
function drawMarkdown(element, source, write) {
  const {blocks, starts} = blocksOf(source), drawn = element.keys || [];
  let same = 0;
  while (same < drawn.length && same < blocks.length && drawn[same] == blocks[same].key) same++;
  while (element.childNodes.length > same) element.lastChild.remove();
  for (const block of blocks.slice(same)) build(block.tokens, element, {starts, write, at: 0});
  element.keys = blocks.map(block => block.key);
}

// Makes the elements of some tokens. state.at: how far the source has been read.
function build(tokens, parent, state) {
  const open = [parent];
  for (const token of tokens) {
    const here = open.at(-1), say = (place, text) => { state.at = state.write(place, text, state.at); };
    if (token.map && token.nesting >= 0) state.at = Math.max(state.at, state.starts[token.map[0]]);
    if (token.type == "inline") build(token.children, here, state);
    else if (token.nesting == 1) open.push(token.hidden ? here : opened(token, here));
    else if (token.nesting == -1) open.pop();
    else if (token.type == "text") say(here, token.content);
    else if (token.type == "code_inline") say(add(here, "code", ""), token.content);
    else if (token.type == "fence" || token.type == "code_block") {
      if (token.type == "fence") state.at = state.starts[token.map[0] + 1] ?? state.at;
      say(codeBlock(here, token.info.trim().split(/\s/)[0]), token.content);
    } else if (token.type == "hr") add(here, "hr", "");
    else if (token.type.endsWith("break")) add(here, "br", "");
  }
}

// The element that a token opens.
function opened(token, parent) {
  if (token.type == "table_open") {
    parent = add(parent, "div", "", "wide");
    scrolls(parent, "table");
  }
  const element = add(parent, NAMES[token.type] || token.tag, "");
  if (token.type == "heading_open") element.className = token.tag;
  if (token.attrGet("start")) element.start = token.attrGet("start");
  const url = token.type == "link_open" && token.attrGet("href");
  if (url && isLink(url)) Object.assign(element, {href: url, target: "_blank", rel: "noopener noreferrer nofollow"});
  return element;
}

// A block of code with its language and a button that copies it. Returns the element for the code.
function codeBlock(parent, language) {
  const block = add(parent, "div", "", "fence"), bar = add(block, "div", "", "bar soft");
  add(bar, "span", language || "code");
  const pre = add(block, "pre", ""), code = add(pre, "code", "");
  scrolls(pre, "code");
  copyButton(bar, () => code.textContent);
  return code;
}

// What is wider than the page is scrolled, with the arrow keys too.
function scrolls(element, name) {
  element.tabIndex = 0;
  element.setAttribute("role", "group");
  element.setAttribute("aria-label", name);
}

function copyButton(parent, text) {
  const button = add(parent, "button", "Copy");
  button.type = "button";
  button.onclick = async () => {
    button.textContent = await copied(text()) ? "Copied" : "Cannot copy";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  };
}

// Puts a text on the clipboard. Browsers offer it to safe pages only, so others use a selection.
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = add(document.body, "textarea", text, "unseen");
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
