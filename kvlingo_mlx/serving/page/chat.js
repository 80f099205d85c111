// A small chat. The whole conversation is sent with each message, as every client does; the server
// finds what its models hold of it.
"use strict";

const $ = (id) => document.getElementById(id);
const KEY = "kvlingo-key";
const TALK = "kvlingo-talk"; // what is said, kept in this tab so that a reload shows it again
let messages = []; // as they are sent, with the model that wrote each answer
let running = null; // the AbortController of the answer that is being written
let follows = true; // whether the end stays in sight; scrolling up ends it
let scrolled = 0; // where the list was scrolled to

// ---- the server ---------------------------------------------------------------------------------

async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers }).catch(gone);
  if (response.ok) return response;
  if (response.status === 401) {
    const wrong = key ? "That is not this server's key. Try again:" : "This server's key:";
    document.querySelector("#key label").textContent = wrong;
    $("key").hidden = false;
    $("given").focus();
    throw new Error("This server wants its key.");
  }
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `The server answered ${response.status}.`);
}

function gone(error) {
  if (error.name === "AbortError") throw error;
  throw new Error("The server does not answer. Is it still running?");
}

// The parsed `data:` of each frame of a stream, until [DONE].
async function* frames(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(gone);
    if (done) throw new Error("The server ended the answer before it was complete.");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data: "))
        .map((line) => line.slice(6)).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

async function status() {
  try {
    const found = await (await call("v1/status")).json();
    $("key").hidden = true;
    listModels(found);
    $("state").textContent = found.worker ? "" : "The models are being loaded.";
    $("held").textContent = found.worker ? held(found.worker) : "";
  } catch (error) {
    $("state").textContent = error.message;
  }
}

function listModels(found) {
  const names = (found.worker?.models ?? []).map((model) => model.name);
  if (found.worker?.routes) names.push("auto");
  const shown = [...$("model").options].map((option) => option.value);
  if (names.length === 0 || names.join("\n") === shown.join("\n")) return;
  const chosen = $("model").value;
  $("model").replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(chosen)) $("model").value = chosen;
}

function held(worker) {
  const budget = worker.budget_bytes ? ` of ${size(worker.budget_bytes)}` : "";
  const weights = worker.models.reduce((sum, m) => sum + (m.loaded ? m.weights_bytes : 0), 0);
  const [here, away] = worker.conversations;
  return `Models ${size(weights)}, conversations ${size(worker.lines_bytes)}${budget}; ` +
    `${here} conversations in memory, ${away} on disk.`;
}

// ---- what is shown ------------------------------------------------------------------------------

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (bytes >= 1000 && at < units.length - 1) { bytes /= 1000; at += 1; }
  return `${bytes >= 100 || at === 0 ? Math.round(bytes) : bytes.toFixed(1)} ${units[at]}`;
}

function seconds(number) {
  return number >= 1 ? `${number.toFixed(1)} s` : `${Math.round(1000 * number)} ms`;
}

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text; // never HTML: models may write anything
  if (className) made.className = className;
  return made;
}

function article(who, text, className) {
  const made = element("article", "", className);
  made.append(element("header", who), element("p"));
  write(made, text);
  $("talk").append(made);
  sizes.observe(made);
  return made;
}

// A message's text; what stands between lines of ``` is code.
function write(shown, text) {
  const parts = text.trimStart().split(/^```.*\n?/m).map((part) => part.replace(/\n$/, ""));
  shown.querySelector(":scope > p").replaceChildren(
    ...parts.map((part, place) => element(place % 2 ? "code" : "span", part)));
}

// Keeps the end in sight, whatever grows or shrinks, until somebody scrolls up.
const sizes = new ResizeObserver(() => {
  if (follows) $("talk").scrollTop = $("talk").scrollHeight;
});
sizes.observe($("talk"));
$("talk").addEventListener("scroll", () => {
  const { scrollTop, scrollHeight, clientHeight } = $("talk");
  if (scrollHeight - scrollTop - clientHeight < 2) follows = true;
  else if (scrollTop < scrolled) follows = false;
  scrolled = scrollTop;
});

function showThinking(shown, text) {
  let box = shown.querySelector("details");
  if (!box) {
    box = element("details");
    box.append(element("summary", "Thinking"), element("p"));
    shown.querySelector("header").after(box);
  }
  box.querySelector("p").append(text);
}

function showUsage(shown, usage) {
  const own = usage.kvlingo ?? {};
  const rows = [
    ["tokens kept", own.cached_tokens ?? 0],
    ["translated", own.translated_tokens ?? 0],
    ["read", own.read_tokens ?? 0],
    ["written", usage.completion_tokens],
  ];
  if (own.ttft_s != null) rows.push(["first token after", seconds(own.ttft_s)]);
  if (own.reread_s != null) rows.push(["reading all would have taken", seconds(own.reread_s)]);
  if (own.fallback) rows.push(["read again, since", own.fallback]);
  else if (own.doubt) rows.push(["in doubt", own.doubt]);
  const list = element("dl");
  for (const [name, value] of rows) {
    const row = element("div");
    row.append(element("dt", name), element("dd", String(value)));
    list.append(row);
  }
  shown.append(list);
}

// ---- a turn -------------------------------------------------------------------------------------

async function answer() {
  const shown = article($("model").value, "", "assistant");
  const said = { role: "assistant", content: "", model: $("model").value };
  const talk = messages; // "New conversation" may begin another one meanwhile
  running = new AbortController();
  busy(true);
  try {
    const body = JSON.stringify({
      model: said.model, messages: talk.map(({ model, ...sent }) => sent), stream: true,
      stream_options: { include_usage: true },
    });
    const response = await call("v1/chat/completions", {
      method: "POST", body, signal: running.signal,
    });
    for await (const frame of frames(response)) {
      if (frame.error) throw new Error(frame.error.message);
      if (frame.model) shown.querySelector("header").textContent = said.model = frame.model;
      const delta = frame.choices?.[0]?.delta ?? {};
      if (delta.reasoning_content) {
        said.reasoning_content = (said.reasoning_content ?? "") + delta.reasoning_content;
        showThinking(shown, delta.reasoning_content);
      }
      if (delta.content) write(shown, said.content += delta.content);
      if (frame.usage) showUsage(shown, frame.usage);
    }
    talk.push(said);
  } catch (error) {
    const stopped = error.name === "AbortError";
    const told = element("div", stopped ? "Stopped." : error.message, stopped ? "note" : "wrong");
    told.role = "alert";
    if (said.content) talk.push(said); // what was written stands
    else takeBack(talk, shown);
    if (talk === messages) (said.content ? shown : $("talk")).append(told);
    sizes.observe(told);
  }
  keep();
  running = null;
  busy(false);
  status();
}

// A message without an answer goes back to where it was typed.
function takeBack(talk, shown) {
  const last = talk.pop();
  shown.previousElementSibling?.remove();
  shown.remove();
  if (talk === messages && !$("text").value) $("text").value = last.content;
}

function keep() {
  try {
    sessionStorage.setItem(TALK, JSON.stringify(messages));
  } catch {
    sessionStorage.removeItem(TALK); // longer than a browser keeps
  }
}

// Shows what was said before this page was loaded again.
function restore() {
  messages = JSON.parse(sessionStorage.getItem(TALK) ?? "[]");
  if (messages.at(-1)?.role === "user") $("text").value = messages.pop().content;
  for (const { role, content, model, reasoning_content: thought } of messages) {
    const shown = article(role === "user" ? "You" : model, content, role);
    if (thought) showThinking(shown, thought);
  }
}

function busy(is) {
  $("send").disabled = is;
  $("stop").hidden = !is;
  if (!is) $("text").focus();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running || !$("model").value) return;
  $("text").value = "";
  document.querySelectorAll("#talk > div").forEach((told) => told.remove());
  messages.push({ role: "user", content: text });
  keep();
  follows = true;
  article("You", text, "user");
  answer();
});

$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});

$("stop").addEventListener("click", () => running?.abort());

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});

$("new").addEventListener("click", () => {
  running?.abort();
  messages = [];
  keep();
  $("talk").replaceChildren();
  $("text").focus();
});

$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("given").value);
  $("given").value = "";
  status();
});

restore();
status();
setInterval(() => { if (!document.hidden) status(); }, 5000);
$("text").focus();
