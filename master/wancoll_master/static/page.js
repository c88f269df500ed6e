"use strict";
// What the master tells, drawn. Names come from the network: they are text, never markup, and keys of Maps alone, as an
// object has members called "constructor" before anybody puts them there.

const SVG = "http://www.w3.org/2000/svg";
const FEW = 60; // members that are drawn and listed one by one
const QUIET = 25; // seconds without a word: the master tells each 10 s that there is no news
const at = (id) => document.getElementById(id);
const told = { sections: new Map(), history: new Map(), ahead: 0, heard: 0, up: false, group: "", whole: false };

function make(space, name, attributes, children) {
  const made = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) if (value !== null && value !== false) made.setAttribute(key, value);
  for (const child of children) made.append(child);
  return made;
}
const h = (name, attributes, ...children) => make("", name, attributes, children);
const s = (name, attributes, ...children) => make(SVG, name, attributes, children);
const fill = (id, ...children) => at(id).replaceChildren(...children);
function write(id, text) { if (at(id).textContent !== text) at(id).textContent = text; }

// ---- figures as people read them --------------------------------------------------------------------------

const clock = () => Date.now() / 1000 + told.ahead;
const three = (value) => String(Number(value.toPrecision(3)));
function scaled(value, unit) {
  for (const [size, prefix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (value >= size * 0.9995) return three(value / size) + " " + prefix + unit;
  return three(value) + " " + unit;
}
const rate = (value) => scaled(value, "B/s");
function span(seconds) {
  if (seconds < 0.0995) return three(Math.max(seconds * 1000, 0.1)) + " ms";
  if (seconds < 9.95) return three(seconds).slice(0, 4) + " s";
  if (seconds < 120) return Math.round(seconds) + " s";
  if (seconds < 7200) return Math.round(seconds / 60) + " min";
  return seconds < 172800 ? Math.round(seconds / 3600) + " h" : Math.round(seconds / 86400) + " d";
}
const ago = (when) => span(Math.max(1, Math.round(clock() - when))) + " ago";
function timer(when) {
  const made = h("time", { datetime: new Date(when * 1000).toISOString(), "data-at": when, title: new Date(when * 1000).toLocaleString() });
  made.textContent = ago(when);
  return made;
}
const hour = (when) => new Date(when * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const count = (number, what) => number + " " + what + (number === 1 ? "" : "s");
const short = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
const of = (part) => told.sections.get("g/" + told.group + "/" + part);

// ---- the first line -----------------------------------------------------------------------------------------

function first() {
  const top = told.sections.get("top"), silent = clock() - told.heard;
  let well = "unknown", line = "asking the master", note = "";
  if (!told.up || silent > QUIET) {
    if (told.heard) { well = "false"; line = "no word from the master for " + span(Math.max(1, Math.round(silent))); note = "asking it again; what is below was so then"; }
  } else if (top) [well, line, note] = [String(top.well), top.line, top.note];
  at("state").dataset.well = well;
  write("mark", { true: "✓", false: "!", unknown: "…" }[well]);
  write("line", line);
  write("note", note);
  document.title = (well === "true" ? "✓ " : well === "false" ? "! " : "") + "wancoll";
  const said = line.replace(/ \(?[\d.]+ s( ago)?\)?/g, "") + (note ? ". " + note.replace(/ \(?[\d.]+ s( ago)?\)?/g, "") : "");
  if (said !== first.said) { first.said = said; at("said").textContent = said; } // aloud when it changes, not each second
  if (!top) return;
  write("name", told.group ? "of " + told.group : "");
  const about = ["wancoll " + (top.version || ""), top.term ? "term " + top.term : "", top.since ? "up " + span(clock() - top.since) : "", top.daemons === undefined ? "" : count(top.daemons, "daemon"), top.more ? count(top.more, "more group") + " not shown" : ""];
  write("about", about.filter(Boolean).join(" · "));
}

function fragment() {
  try { return decodeURIComponent(location.hash.slice(1)); } catch { return ""; } // whoever sends a link chooses it
}

function groups() {
  const top = told.sections.get("top"), names = (top && top.groups) || [];
  const wanted = fragment();
  told.group = names.includes(wanted) ? wanted : names.includes(told.group) ? told.group : names[0] || "";
  at("main").hidden = !told.group;
  const key = JSON.stringify([names, told.group]);
  if (key === groups.key) return;
  groups.key = key;
  const choose = (name) => { history.replaceState(null, "", "#" + encodeURIComponent(name)); told.group = name; told.whole = false; all(); };
  if (names.length < 2) { fill("groups"); return; }
  const select = h("select", { "aria-label": "Group" }, ...names.map((name) => h("option", { value: name, selected: name === told.group }, name)));
  select.addEventListener("change", () => choose(select.value));
  fill("groups", select);
}

// ---- members and links --------------------------------------------------------------------------------------

const W = 480, H = 400, MID = [W / 2, H / 2], R = 148;
const spot = (rank, world, r) => { const turn = (2 * Math.PI * rank) / world - Math.PI / 2; return [MID[0] + r * Math.cos(turn), MID[1] + r * Math.sin(turn)]; };
const xy = (point) => point.map((one) => one.toFixed(1)).join(" ");

function road(from, to, world) {
  const [a, b] = [spot(from, world, R), spot(to, world, R)];
  if (to === (from + 1) % world) return `M${xy(a)}A${R} ${R} 0 0 1 ${xy(b)}`;
  const steps = Math.abs(to - from), pull = Math.max(0.3, 1 - (2.2 * Math.min(steps, world - steps)) / world); // the farther, the deeper
  const middle = [0, 1].map((i) => MID[i] + ((a[i] + b[i]) / 2 - MID[i]) * pull);
  return `M${xy(a)}Q${xy(middle)} ${xy(b)}`;
}

function ring() {
  const members = of("members"), links = (of("links") || { drawn: [] }).drawn;
  if (!members) return;
  const here = members.here.filter((one) => one[4] >= 0), world = here.length;
  const key = JSON.stringify([told.group, here.map((one) => one[0]), links.map((one) => one[0] * 10000 + one[1])]);
  if (key !== ring.key) { ring.key = key; draw(here, links); }
  const most = Math.max(0, ...links.map((one) => one[2] || 0));
  links.forEach(([from, to, speed, loss, trip], i) => {
    const path = ring.paths[i], share = most && speed ? Math.sqrt(speed / most) : 0;
    const kind = speed === null ? "unknown" : loss > 0.03 ? "bad" : loss > 0.005 ? "lossy" : speed < most / 1000 || !most ? "idle" : "";
    path.setAttribute("class", "link " + kind);
    path.setAttribute("stroke-width", speed === null || kind === "idle" ? 1.2 : ((world > FEW ? 1 : 1.5) + (world > FEW ? 3 : 5) * share).toFixed(1));
    path.setAttribute("stroke-opacity", kind === "idle" || kind === "unknown" ? 1 : (0.35 + 0.65 * share).toFixed(2));
    const facts = [speed === null ? "not known" : rate(speed), loss ? three(loss * 100) + " % sent again" : "", trip ? span(trip) + " round trip" : ""];
    path.firstChild.textContent = here[from] && here[to] ? here[from][0] + " → " + here[to][0] + ": " + facts.filter(Boolean).join(", ") : "";
  });
  const held = here.filter((one) => one[6]), silent = here.filter((one) => one[5]);
  here.forEach((one, i) => {
    const node = ring.nodes[i];
    if (!node) return;
    node.dot.setAttribute("class", "node" + (one[6] ? " held" : one[5] ? " silent" : ""));
    node.sign.textContent = one[6] ? "!" : "";
    node.title.textContent = [one[0], one[1] !== one[0] ? "daemon " + one[1] : "", one[2] ? "site " + one[2] : "", one[6] || (one[5] ? "silent for " + one[5] + " s" : "")].filter(Boolean).join(", ");
  });
  if (world > 4 * FEW) ring.marks.replaceChildren(...here.filter((one) => one[5] || one[6]).slice(0, FEW).map((one) => {
    const [cx, cy] = spot(one[4], world, R);
    return s("circle", { cx, cy, r: 6, class: "node " + (one[6] ? "held" : "silent") }, s("title", {}, one[0]));
  }));
  const now = of("now");
  ring.world.textContent = world;
  ring.epoch.textContent = (world === 1 ? "member" : "members") + (now && now.joining ? ", " + now.joining + " joining" : "");
  const rated = links.filter((one) => one[2]).map((one) => one[2]);
  const parts = [count(world, "member"), rated.length ? "links carry up to " + rate(most) : "", held.length ? "waiting for " + held.map((one) => one[0]).join(", ") : "", silent.length ? "silent: " + silent.map((one) => one[0]).join(", ") : "", members.lost.length ? "lost lately: " + members.lost.map((one) => one[0]).join(", ") : ""];
  ring.svg.setAttribute("aria-label", "Ring of " + parts.filter(Boolean).join("; "));
  const gone = JSON.stringify(members.lost);
  if (gone !== ring.gone) {
    ring.gone = gone;
    fill("lost", ...members.lost.map(([name, when, why]) => h("li", { title: why }, "✕ " + name + " lost ", timer(when))));
  }
  write("most", most ? rate(most) : "busiest");
}

// Long names without the words that all begin and end with, at most so many letters; the middle goes if that is not enough.
function cut(names, most) {
  const alike = (at) => { let n = 0; while (names.length > 1 && names.every((one) => at(one, n) && at(one, n) === at(names[0], n))) n++; return n; };
  const first = names[0] || "", head = first.slice(0, alike((one, n) => one[n]));
  const tail = first.slice(first.length - alike((one, n) => one[one.length - 1 - n]));
  const start = head.lastIndexOf("-") + 1, end = tail.includes("-") ? tail.length - tail.indexOf("-") : 0;
  return names.map((name) => {
    if (name.length <= most) return name;
    const rest = (start ? "…" : "") + name.slice(start, Math.max(start, name.length - end)) + (end ? "…" : "");
    return rest.length > most ? rest.slice(0, 4) + "…" + rest.slice(5 - most) : rest;
  });
}

function draw(here, links) {
  const world = here.length, many = world > FEW;
  ring.paths = links.map(([from, to]) => s("path", { d: road(from, to, world) }, s("title")));
  ring.nodes = here.map((one, rank) => {
    if (world > 4 * FEW) return null;
    const [x, y] = spot(rank, world, R), size = many ? 3.5 : world > 24 ? 6 : 9;
    const dot = s("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r: size }), title = s("title"), sign = s("text", { class: "sign", x: x.toFixed(1), y: (y + 4).toFixed(1) });
    return { dot, title, sign, all: s("g", {}, title, dot, sign) };
  });
  const every = Math.max(1, Math.ceil(world / 32)), names = cut(here.map((one) => one[0]), 11);
  const labels = here.map((one, rank) => {
    if (rank % every || many) return null;
    const [x, y] = spot(rank, world, R + 17), right = x > MID[0] + 12, left = x < MID[0] - 12;
    const lift = right || left ? 4 : y < MID[1] ? -3 : 11;
    return s("text", { x: x.toFixed(1), y: (y + lift).toFixed(1), "text-anchor": right ? "start" : left ? "end" : "middle" }, names[rank]);
  });
  ring.world = s("text", { class: "big halo", x: MID[0], y: MID[1] + 4, "text-anchor": "middle" });
  ring.epoch = s("text", { class: "small halo", x: MID[0], y: MID[1] + 24, "text-anchor": "middle" });
  ring.marks = s("g"); // those among very many that stand out
  ring.svg = s("svg", { viewBox: `0 0 ${W} ${H}`, role: "img" }, ...ring.paths, ...ring.nodes.filter(Boolean).map((one) => one.all), ring.marks, ...labels.filter(Boolean), ring.world, ring.epoch);
  fill("picture", ring.svg);
}

// ---- what runs ----------------------------------------------------------------------------------------------

function doing() {
  const now = of("now");
  if (!now) return;
  const figure = (name, value, unit) => h("div", {}, h("dt", {}, name), h("dd", {}, value, unit ? h("small", {}, " " + unit) : ""));
  const cut = (text) => { const [value, unit] = text.split(" "); return [value, unit]; };
  fill("figures",
    figure("over links", ...(now.rate === null ? ["–"] : cut(rate(now.rate)))),
    figure("operations", now.ops === null ? "–" : three(now.ops), now.ops === null ? "" : "per s"),
    figure("committed", now.committed.toLocaleString("en").replaceAll(",", " ")),
    figure("epoch", String(now.epoch || "–")));
  const lines = [];
  const quick = now.ops !== null && now.ops >= 2;
  if (now.phase !== "running") lines.push(h("p", { class: "waits" }, "The group is " + now.phase + ", and waits for " + (now.waiting || "its members") + "."));
  else if (now.waits.length) {
    for (const [text, bytes, since] of now.waits) lines.push(h("p", { class: "waits" }, text + (bytes ? " (" + scaled(bytes, "B") + ")" : "") + ", called ", timer(since), "."));
  } else if (now.runs && !quick) {
    const rest = now.lacking > now.lacks.length ? " and " + (now.lacking - now.lacks.length) + " more" : "";
    lines.push(h("p", {}, "Operation " + now.runs + " runs" + (now.lacking ? "; not called yet by " + now.lacks.join(", ") + rest : "; all have called it") + ". Since ", timer(now.since), "."));
  } else if (quick) lines.push(h("p", {}, "Operations follow each other; nobody is waited for."));
  else lines.push(h("p", { class: "none" }, "No operation runs."));
  if (now.phase === "running" && now.waiting && !now.waits.length && !quick) lines.push(h("p", { class: "dim" }, "Waits for " + now.waiting + "."));
  if (now.joining && now.phase === "running") lines.push(h("p", {}, count(now.joining, "member") + " to be let in at the next update_membership()."));
  for (const [source, target, kind, why, times, done] of now.pairs) lines.push(h("p", { class: "dim" }, `Link ${source} → ${target} ${kind}${times > 1 ? " " + times + " times" : ""}: ${why}${done ? "; " + done : ""}.`));
  fill("doing", ...lines);
}

// ---- over time ----------------------------------------------------------------------------------------------

const signs = { lost: "✕", joined: "+", first: "●", other: "↻" };
const kinds = { lost: "loss", joined: "join", first: "first epoch", other: "new epoch" };

function width(id) { return Math.max(280, Math.round(at(id).clientWidth)); }

function flow() {
  const samples = told.history.get(told.group) || [], w = width("chart"), tall = w > 520 ? 300 : 150, left = 4, bottom = 18, head = 16;
  const bytes = samples.some((one) => one[1] !== null), value = (one) => (bytes ? one[1] : one[2]);
  write("flow-unit", samples.length ? (bytes ? "bytes over links" : "operations per second") + ", while somebody looks" : "");
  if (samples.length < 2) { fill("chart", h("p", { class: "none" }, "Measured from now on, while somebody looks.")); return; }
  const end = Math.max(clock(), samples[samples.length - 1][0]), start = Math.min(samples[0][0], end - 60), top = Math.max(1e-9, ...samples.map((one) => value(one) || 0));
  const x = (when) => left + ((w - 2 * left) * (when - start)) / (end - start), y = (v) => tall - bottom - ((tall - bottom - head) * v) / top;
  const runs = [];
  samples.forEach((one, i) => {
    if (value(one) === null) return;
    if (!i || one[0] - samples[i - 1][0] > 5 || value(samples[i - 1]) === null) runs.push([]);
    runs[runs.length - 1].push([x(one[0]), y(value(one))]);
  });
  const parts = [s("line", { class: "axis", x1: left, x2: w - left, y1: tall - bottom, y2: tall - bottom })];
  for (const run of runs) {
    const line = run.map(xy).join("L"), floor = tall - bottom;
    parts.push(s("path", { class: "area", d: `M${run[0][0].toFixed(1)} ${floor}L${line}L${run[run.length - 1][0].toFixed(1)} ${floor}Z` }), s("path", { class: "line", d: "M" + line }));
  }
  for (const [number, when, world, kind, reason] of of("epochs") || []) {
    if (when < start) continue;
    parts.push(s("line", { class: "event", x1: x(when), x2: x(when), y1: head, y2: tall - bottom }), s("text", { class: "tag " + kind, x: x(when).toFixed(1), y: 11 }, signs[kind], s("title", {}, `epoch ${number}: ${reason}`)));
  }
  const shown = bytes ? rate(top) : three(top) + " per s";
  parts.push(s("text", { class: "small halo", x: left, y: head + 11 }, shown), s("text", { class: "small", x: left, y: tall - 4 }, hour(start)), s("text", { class: "small", x: w - left, y: tall - 4, "text-anchor": "end" }, hour(end)));
  const last = value(samples[samples.length - 1]);
  fill("chart", s("svg", { viewBox: `0 0 ${w} ${tall}`, role: "img", "aria-label": "Throughput over the last " + span(end - start) + ": up to " + shown + ", now " + (last === null ? "not known" : bytes ? rate(last) : three(last) + " per s") }, ...parts));
}

function past() {
  const epochs = of("epochs") || [];
  if (!epochs.length) { fill("steps"); fill("epochs", h("li", { class: "none" }, "No epoch yet.")); return; }
  const w = width("steps"), tall = 84, left = 22, bottom = 16, head = 15, late = epochs.slice(-12);
  const end = clock(), start = Math.min(late[0][1], end - 10), top = Math.max(1, ...late.map((one) => one[2]));
  const x = (when) => left + ((w - left - 6) * (when - start)) / (end - start), y = (v) => tall - bottom - ((tall - bottom - head) * v) / top;
  let path = "";
  late.forEach((one, i) => { path += (i ? "V" + y(one[2]).toFixed(1) : "M" + xy([x(one[1]), y(one[2])])) + "H" + x(i + 1 < late.length ? late[i + 1][1] : end).toFixed(1); });
  const floor = tall - bottom;
  const parts = [s("line", { class: "axis", x1: left, x2: w - 6, y1: floor, y2: floor }), s("path", { class: "area", d: path + `V${floor}H${x(late[0][1]).toFixed(1)}Z` }), s("path", { class: "line", d: path })];
  let free = -99;
  for (const [number, when, world, kind, reason] of late) {
    if (x(when) - free < 11) continue;
    free = x(when);
    parts.push(s("text", { class: "tag " + kind, x: x(when).toFixed(1), y: (y(world) - 4).toFixed(1) }, signs[kind], s("title", {}, `epoch ${number}: ${reason}`)));
  }
  parts.push(s("text", { class: "small", x: left - 5, y: (y(top) + 4).toFixed(1), "text-anchor": "end" }, String(top)), s("text", { class: "small", x: left - 5, y: floor + 3, "text-anchor": "end" }, "0"), s("text", { class: "small", x: left, y: tall - 3 }, hour(start)), s("text", { class: "small", x: w - 6, y: tall - 3, "text-anchor": "end" }, "now"));
  fill("steps", s("svg", { viewBox: `0 0 ${w} ${tall}`, role: "img", "aria-label": "Members over time, " + late.map((one) => `epoch ${one[0]}: ${one[2]}`).join(", ") }, ...parts));
  const key = JSON.stringify([told.group, epochs]);
  if (key === past.key) return;
  past.key = key;
  fill("epochs", ...epochs.slice().reverse().map(([number, when, world, kind, reason, gap, recovery]) => {
    const cost = recovery ? ["went on after " + span(recovery)] : gap || kind === "lost" ? ["new epoch after " + span(gap)] : [];
    return h("li", { "data-kind": kind }, h("span", { class: kind, "aria-label": kinds[kind], role: "img" }, signs[kind]),
      h("div", {}, h("div", {}, `epoch ${number}, ` + count(world, "member"), ...cost.map((one) => h("span", { class: "cost" }, " · " + one))), h("div", { class: "dim" }, short(reason, 300))), timer(when));
  }));
}

// ---- tables and lists -----------------------------------------------------------------------------------------

function people() {
  const members = of("members");
  if (!members) return;
  const sent = (of("links") || { sends: [] }).sends;
  const wait = (one) => (one[6] ? 0 : one[5] ? 1 : one[4] < 0 ? 2 : 3);
  const sorted = members.here.length > FEW ? members.here.slice().sort((a, b) => wait(a) - wait(b) || a[4] - b[4]) : members.here;
  const shown = told.whole ? sorted : sorted.slice(0, FEW);
  const key = JSON.stringify([told.group, shown.map((one) => [one[0], one[1], one[2], one[3], one[4]]), members.lost]);
  if (key !== people.key) {
    people.key = key;
    people.rows = shown.map((one) => {
      const cells = { state: h("td"), sends: h("td", { class: "number" }) };
      const where = [one[1] !== one[0] ? one[1] : "", one[2], one[3]].filter(Boolean).join(" · ");
      return { ...cells, row: h("tr", {}, h("td", {}, one[4] >= 0 ? String(one[4]) : "–"), h("th", { scope: "row" }, one[0]), cells.state, cells.sends, h("td", { class: "wide dim" }, where)) };
    });
    const lost = members.lost.map(([name, when, why]) => h("tr", { class: "lost" }, h("td", {}, "✕"), h("th", { scope: "row" }, name), h("td", { class: "bad" }, "lost ", timer(when)), h("td"), h("td", { class: "wide dim" }, short(why, 80))));
    fill("rows", ...people.rows.map((one) => one.row), ...lost);
  }
  shown.forEach((one, i) => {
    const { state, sends } = people.rows[i];
    const text = one[6] ? "! waited for: " + one[6] : one[5] ? "! silent for " + one[5] + " s" : one[4] < 0 ? "joining" : "✓ here";
    if (state.textContent !== text) { state.textContent = text; state.className = one[6] ? "warn" : one[5] ? "bad" : one[4] < 0 ? "dim" : "good"; }
    sends.textContent = typeof sent[one[4]] !== "number" ? "–" : rate(sent[one[4]]);
  });
  at("all").hidden = sorted.length <= FEW;
  write("all", told.whole ? "Show fewer" : "Show all " + sorted.length);
}

function plan() {
  const found = of("plan");
  if (!found) return;
  const facts = found.facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]);
  fill("facts", ...(facts.length ? facts : [h("dd", { class: "none" }, "Made when the group starts.")]));
  at("why-title").hidden = !found.why.length;
  fill("why", ...found.why.map(([when, epoch, text]) => h("li", {}, text + " ", timer(when))));
}

function events() {
  const found = told.sections.get("events") || [];
  const lines = found.filter((one) => !one[1] || one[1] === told.group).reverse();
  fill("events", ...(lines.length ? lines : [[0, "", 0, "", "None yet."]]).map(([when, , epoch, kind, text]) =>
    h("li", {}, when ? h("time", { datetime: new Date(when * 1000).toISOString() }, hour(when)) : "", h("span", { class: "kind" + (/died|evicted|away|deaf|digest|refused/.test(kind) ? " bad" : "") }, kind), h("span", { class: "text" }, short(text, 600)))));
}

function tick() {
  for (const one of document.querySelectorAll("time[data-at]")) one.textContent = ago(Number(one.dataset.at));
  first();
}
function all() { groups(); first(); if (told.group) for (const part of [ring, doing, flow, past, people, plan, events]) part(); }

// ---- what is told ---------------------------------------------------------------------------------------------

function take(message) {
  told.ahead = message.at - Date.now() / 1000;
  told.heard = clock();
  told.up = true;
  const changed = new Set();
  for (const [name, what] of Object.entries(message)) {
    if (name === "at") continue;
    const group = name.startsWith("g/") ? name.slice(2, name.lastIndexOf("/")) : "";
    const part = name.slice(name.lastIndexOf("/") + 1);
    if (group && part === "history") { told.history.set(group, what); changed.add("flow"); continue; }
    told.sections.set(name, what);
    if (part === "now" && what.sample) {
      const kept = told.history.get(group) || [];
      told.history.set(group, kept);
      if (!kept.length || kept[kept.length - 1][0] < what.sample[0]) kept.push(what.sample);
      if (kept.length > 600) kept.shift();
    }
    if (!group || group === told.group) changed.add(part);
  }
  if (message.top) {
    const names = new Set(message.top.groups);
    for (const name of told.sections.keys()) if (name.startsWith("g/") && !names.has(name.slice(2, name.lastIndexOf("/")))) told.sections.delete(name);
    for (const name of told.history.keys()) if (!names.has(name)) told.history.delete(name);
  }
  const before = told.group;
  groups();
  first();
  if (!told.group) return;
  if (told.group !== before) { all(); return; }
  if (changed.has("members") || changed.has("links") || changed.has("now")) { ring(); people(); }
  if (changed.has("now")) { doing(); flow(); }
  if (changed.has("epochs") || changed.has("now")) past();
  if (changed.has("flow")) flow();
  if (changed.has("plan")) plan();
  if (changed.has("events")) events();
}

function listen() {
  const source = new EventSource("events");
  source.onmessage = (event) => take(JSON.parse(event.data));
  source.onopen = () => { told.up = true; if (told.heard) told.heard = clock(); };
  source.onerror = () => {
    told.up = false;
    first();
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 3000); // refused, such as for too many viewers
  };
}

at("all").addEventListener("click", () => { told.whole = !told.whole; people(); });
addEventListener("hashchange", all);
addEventListener("resize", () => { if (told.group) { flow(); past(); } });
setInterval(tick, 1000);
listen();
