// Chat, and the memory behind it: a map of blocks, the steps, the text of a block. Text of others only ever becomes
// textContent.

const MAX_CELLS = 4096; // of the map; beyond these a cell is several blocks
const POLL_MS = 700;

const $ = (id) => document.getElementById(id);
const base = new URL(".", document.baseURI);

let key = sessionStorage.getItem("kvmem key") || "";
let messages = []; // of the conversation of this workspace, as the API takes them
let blocks = [];
let groups = []; // [first block, one after the last] of each cell of the map
let recalls = [];
let opened = -1; // first token of the block that is shown
let running = null; // AbortController of the answer that is written
let refreshing = false;
let known = new Set(); // names of workspaces that are there

// -- the API

async function api(path, options = {}) {
  const headers = { ...(options.body ? { "content-type": "application/json" } : {}) };
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(new URL(path, base), { ...options, headers: { ...headers, ...options.headers } });
  if (response.status === 401 && !options.again) {
    await askForKey();
    return api(path, { ...options, again: true });
  }
  return response;
}

async function json(path, options) {
  const response = await api(path, options);
  const body = await response.json();
  if (!response.ok) throw new Error(body.error?.message ?? `HTTP ${response.status}`);
  return body;
}

const post = (path, body) => json(path, { method: "POST", body: JSON.stringify(body) });
const ofWorkspace = (rest) => `kvmem/v1/workspaces/${encodeURIComponent($("name").value)}${rest}`;

function askForKey() {
  const dialog = $("key-dialog");
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      key = $("key").value;
      sessionStorage.setItem("kvmem key", key);
      resolve();
    }, { once: true });
    if (!dialog.open) dialog.showModal();
  });
}

// -- chat

function shown(role, text = "") {
  const item = document.createElement("li");
  item.className = role;
  item.textContent = text;
  $("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

function say(text) {
  $("state").textContent = text;
}

async function ask(question) {
  messages.push({ role: "user", content: question });
  const asked = shown("user", question);
  const item = shown("assistant");
  const reasoning = document.createElement("span");
  reasoning.className = "reasoning";
  const content = document.createElement("span");
  item.append(reasoning, content);
  running = new AbortController();
  setRunning(true);
  poll(running.signal);
  try {
    await stream(running.signal, reasoning, content);
  } catch (error) {
    if (error.name !== "AbortError") {
      shown("error", error.message);
      say("");
    } else {
      say("stopped");
    }
  } finally {
    if (content.textContent || reasoning.textContent) {
      messages.push({ role: "assistant", content: content.textContent });
    } else { // nothing was answered: it can be sent again, and the next request does not hold it twice
      messages.pop();
      item.remove();
      asked.remove();
      $("question").value ||= question;
    }
    keep();
    running.abort(); // ends the polling
    running = null;
    setRunning(false);
    await refresh();
    await listNames();
  }
}

async function poll(signal) {
  while (!signal.aborted) {
    await new Promise((resolve) => setTimeout(resolve, blocks.length > MAX_CELLS ? 10 * POLL_MS : POLL_MS));
    if (!signal.aborted) await refresh();
  }
}

async function stream(signal, reasoning, content) {
  const body = {
    messages,
    stream: true,
    return_progress: true,
    max_tokens: Number($("max-tokens").value) || 512,
    kvmem: { workspace: $("name").value, report: true },
  };
  const response = await api("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  if (!response.ok) {
    const answer = await response.json();
    throw new Error(answer.error?.message ?? `HTTP ${response.status}`);
  }
  for await (const data of events(response)) {
    if (data.error) throw new Error(data.error.message);
    const progress = data.prompt_progress;
    if (progress) say(`reading: ${progress.processed.toLocaleString()} of ${progress.total.toLocaleString()} tokens`);
    const delta = data.choices?.[0]?.delta ?? {};
    if (delta.reasoning_content) reasoning.textContent += delta.reasoning_content;
    if (delta.content) {
      content.textContent += delta.content;
      content.parentElement.scrollIntoView({ block: "end" });
    }
    if (data.timings) say(told(data.timings));
  }
}

function told(timings) {
  const rate = timings.predicted_per_second ? `, ${timings.predicted_per_second.toFixed(1)} tokens/s` : "";
  return `${timings.prompt_n.toLocaleString()} tokens read, ${timings.cache_n.toLocaleString()} were there already; `
    + `${timings.predicted_n} written${rate}`;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data:"))?.slice(5).trim();
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function setRunning(is) {
  $("send").disabled = $("name").disabled = $("fresh").disabled = is;
  $("stop").disabled = !is;
}

// The messages of a conversation are kept as long as this tab is open; the server has them only as tokens.
const slot = () => `kvmem messages ${$("name").value}`;

function keep() {
  try {
    sessionStorage.setItem(slot(), JSON.stringify(messages));
  } catch {
    // no room: the conversation goes on as long as the page is there
  }
}

// -- memory

async function refresh() {
  if (refreshing || !$("name").value) return;
  refreshing = true;
  try {
    if (!known.has($("name").value)) await listNames();
    if (!known.has($("name").value)) {
      clear();
      return;
    }
    const [all, history, steps] = await Promise.all(
      ["/blocks", "/recalls", "/steps?n=50"].map((rest) => json(ofWorkspace(rest))),
    );
    blocks = all.blocks;
    recalls = history.recalls;
    draw();
    drawSteps(steps.steps);
    $("facts").textContent = `${all.n_tokens.toLocaleString()} tokens in ${blocks.length.toLocaleString()} blocks`;
  } catch (error) {
    if (running === null) say(error.message);
  } finally {
    refreshing = false;
  }
}

function clear() {
  blocks = groups = recalls = [];
  $("map").replaceChildren();
  $("steps").replaceChildren();
  $("block").hidden = true;
  opened = -1;
  $("facts").textContent = "nothing is stored yet";
}

function heat(n) {
  return n === 0 ? 0 : n < 2 ? 1 : n < 5 ? 2 : n < 15 ? 3 : 4;
}

function draw() {
  const each = Math.max(1, Math.ceil(blocks.length / MAX_CELLS));
  const last = new Set((recalls.at(-1)?.blocks ?? []).map((block) => block.start));
  const map = $("map");
  groups = [];
  for (let i = 0; i < blocks.length; i += each) groups.push([i, Math.min(i + each, blocks.length)]);
  while (map.children.length > groups.length) map.lastElementChild.remove();
  while (map.children.length < groups.length) {
    const cell = document.createElement("button");
    cell.type = "button";
    map.append(cell);
  }
  groups.forEach(([first, end], i) => {
    const inside = blocks.slice(first, end);
    const cell = map.children[i];
    const recalled = Math.max(...inside.map((block) => block.recalls));
    set(cell, "tier", inside[0].tier);
    set(cell, "heat", heat(recalled));
    set(cell, "pinned", inside.some((block) => block.pinned));
    set(cell, "recalled", inside.some((block) => last.has(block.start)));
    const label = `tokens ${inside[0].start} to ${inside.at(-1).start + inside.at(-1).count - 1}, ${inside[0].tier}, `
      + `recalled ${recalled} times`;
    if (cell.title !== label) {
      cell.title = label;
      cell.setAttribute("aria-label", label);
    }
    cell.setAttribute("aria-pressed", inside.some((block) => block.start === opened));
  });
}

function set(element, name, value) {
  if (element.dataset[name] !== String(value)) element.dataset[name] = value;
}

function drawSteps(steps) {
  const longest = Math.max(1, ...steps.map((step) => step.end - step.start));
  const rows = [
    ...steps.map((step) => {
      const n = step.end - step.start;
      const text = `${n.toLocaleString()} tokens from ${step.start.toLocaleString()} on`;
      return [step.time, row(`${step.number + 1}. ${step.kind}`, text, step.time, n / longest)];
    }),
    ...recalls.map((recall) => [recall.time, row("recall", recallText(recall), recall.time)]),
  ];
  rows.sort((one, other) => other[0] - one[0]);
  $("steps").replaceChildren(...rows.map(([, item]) => item));
}

function row(kind, text, time, share) {
  const item = document.createElement("li");
  const what = document.createElement("div");
  what.textContent = `${text}, ${new Date(time * 1000).toLocaleTimeString()}`;
  if (share !== undefined) {
    const bar = document.createElement("progress");
    bar.value = share;
    what.append(bar);
  }
  const head = document.createElement("span");
  head.textContent = kind;
  item.append(head, what);
  return item;
}

function recallText(recall) {
  const ms = Object.values(recall.timings).reduce((sum, part) => sum + part, 0);
  const where = recall.mid_answer ? " in mid-answer" : "";
  return `${recall.n_selected} of ${recall.n_candidates} blocks${where}, ${ms.toFixed(0)} ms`;
}

async function open(start) {
  const block = blocks.find((one) => one.start === start);
  if (!block) return;
  opened = start;
  draw();
  const end = start + block.count;
  const found = await json(ofWorkspace(`/blocks?start=${start}&end=${end}&text=true`));
  const now = found.blocks.find((one) => one.start === start) ?? block;
  $("block-title").textContent = `tokens ${start.toLocaleString()} to ${(end - 1).toLocaleString()}`;
  $("block-facts").textContent = factsOf(now);
  $("block-text").textContent = now.text ?? "";
  $("pin").textContent = now.pinned ? "unpin" : "pin";
  $("block").hidden = false;
}

function factsOf(block) {
  const facts = [`on tier ${block.tier}`, `recalled ${block.recalls} times`, block.origin];
  for (const recall of recalls.toReversed()) {
    const seen = recall.blocks.find((one) => one.start === block.start);
    if (!seen) continue;
    facts.push(seen.rank === null ? `in the last view as ${seen.why}` : `rank ${seen.rank}, score ${seen.score?.toPrecision(3)}`);
    for (const [name, rank] of Object.entries(seen.channels)) facts.push(`${name}: ${rank}.`);
    break;
  }
  return facts.join("; ");
}

async function search(query) {
  const found = await post(ofWorkspace("/search"), { query, n_blocks: 10 });
  const starts = found.blocks.map((block) => block.start);
  groups.forEach(([first, end], i) => {
    set($("map").children[i], "found", blocks.slice(first, end).some((block) => starts.includes(block.start)));
  });
  if (starts.length) await open(starts[0]);
  say(`${starts.length} blocks found`);
}

// -- workspaces

async function listNames() {
  const { workspaces } = await json("kvmem/v1/workspaces");
  known = new Set(workspaces.map((workspace) => workspace.name));
  $("names").replaceChildren(...workspaces.map((workspace) => {
    const option = document.createElement("option");
    option.value = workspace.name;
    option.label = `${workspace.n_tokens.toLocaleString()} tokens`;
    return option;
  }));
}

async function choose(name) {
  $("name").value = name;
  sessionStorage.setItem("kvmem workspace", name);
  messages = JSON.parse(sessionStorage.getItem(slot()) ?? "[]");
  $("messages").replaceChildren();
  for (const message of messages) shown(message.role, message.content);
  clear();
  await refresh();
  const elsewhere = messages.length === 0 && blocks.length > 0;
  $("question").disabled = $("send").disabled = elsewhere;
  say(elsewhere ? "This conversation began elsewhere: look at it here, or begin a new one." : "");
}

const freshName = () => `page ${new Date().toISOString().slice(0, 19).replace("T", " ")}`;

function report(promise) {
  promise.catch((error) => say(error.message));
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || running) return;
  $("question").value = "";
  report(ask(question));
});
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("fresh").addEventListener("click", () => report(choose(freshName())));
$("name").addEventListener("change", () => report(choose($("name").value.trim() || freshName())));
$("map").addEventListener("click", (event) => {
  const cell = event.target.closest("#map > button");
  const group = cell && groups[Array.prototype.indexOf.call($("map").children, cell)];
  if (group) report(open(blocks[group[0]].start));
});
$("search").addEventListener("submit", (event) => {
  event.preventDefault();
  if ($("query").value.trim()) report(search($("query").value));
});
$("pin").addEventListener("click", () => {
  const block = blocks.find((one) => one.start === opened);
  if (!block) return;
  const range = { start: block.start, end: block.start + block.count };
  report(post(ofWorkspace(block.pinned ? "/unpin" : "/pin"), range).then(refresh).then(() => open(block.start)));
});
for (const tab of ["chat", "memory"]) {
  $(`show-${tab}`).addEventListener("click", () => { document.body.dataset.tab = tab; });
}

async function begin() {
  for (;;) {
    const response = await api("v1/models");
    if (response.status === 503) {
      say("the model is loading");
      await new Promise((resolve) => setTimeout(resolve, 500));
      continue;
    }
    const { data } = await response.json();
    const model = data?.[0];
    if (model) $("model").textContent = `${model.id}, a view of ${model.meta.n_ctx.toLocaleString()} tokens`;
    break;
  }
  await listNames();
  await choose(sessionStorage.getItem("kvmem workspace") || freshName());
}

report(begin());
