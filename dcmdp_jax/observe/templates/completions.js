"use strict";
// Shows the completions of a page: filtered, sorted, a few at a time, each token colored by p - q.
(function () {
  const data = JSON.parse(document.getElementById("completions").textContent);
  const get = (id) => document.getElementById(id);
  const list = get("list"), PAGE = 20;
  let shown = PAGE;
  const html = (name, className, parent, text) => {
    const node = document.createElement(name);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  };
  const number = (value) => (value === null ? "-" : String(+value.toPrecision(4)));
  const fill = (id, values) => {
    const select = get(id), kinds = [...new Set(values.filter((v) => v !== null))].sort((a, b) => (typeof a === "number" ? a - b : a < b ? -1 : 1));
    for (const kind of kinds) html("option", "", select, String(kind)).value = String(kind);
    select.parentNode.hidden = kinds.length < 2;
  };
  fill("run", data.rows.map((row) => row.run));
  fill("step", data.rows.map((row) => row.step));
  fill("source", data.rows.map((row) => row.source));
  const bound = (id, otherwise) => (get(id).value.trim() === "" || isNaN(+get(id).value) ? otherwise : +get(id).value);
  const ORDERS = {
    order: () => 0,
    step: (a, b) => (a.step || 0) - (b.step || 0),
    reward: (a, b) => (b.reward || 0) - (a.reward || 0),
    length: (a, b) => (b.length || 0) - (a.length || 0),
  };

  function chosen() {
    const same = (id, value) => get(id).value === "" || get(id).value === String(value);
    const text = get("text").value.toLowerCase();
    const inside = (value, low, high) => (value === null ? bound(low, null) === null && bound(high, null) === null : value >= bound(low, -Infinity) && value <= bound(high, Infinity));
    return data.rows
      .filter((row) => same("run", row.run) && same("step", row.step) && same("source", row.source))
      .filter((row) => inside(row.reward, "reward-low", "reward-high") && inside(row.discrepancy, "delta-low", "delta-high"))
      .filter((row) => text === "" || (row.prompt + "\n" + whole(row)).toLowerCase().includes(text))
      .sort(ORDERS[get("sort").value]);
  }
  // Completions that are alike token by token are one entry, the first of them.
  function grouped(rows) {
    const groups = new Map();
    for (const row of rows) {
      const key = JSON.stringify([row.run, row.step, row.source, row.prompt, whole(row)]);
      groups.set(key, [...(groups.get(key) || []), row]);
    }
    return [...groups.values()];
  }
  const control = new RegExp(`(${data.control || "$^"})`);
  // Text with its control tokens in spans, which can be hidden.
  const plain = (text, parent) => text.split(control).forEach((part, at) => part && html("span", at % 2 ? "control" : "", parent, part));
  const whole = (row) => (row.tokens ? row.tokens.map((id) => data.words[id]).join("") : row.text);
  const color = (p, q) => {
    const delta = p - q, strength = Math.min(1, Math.abs(delta) / data.full_color);
    return strength < 0.02 ? "" : `rgba(${delta > 0 ? "230,159,0" : "86,180,233"},${(0.85 * strength).toFixed(2)})`;
  };

  function card(alike) {
    const row = alike[0];
    const box = html("details", "completion", list), head = html("summary", "", box);
    const tag = (text, kind) => html("span", "tag " + (kind || ""), head, text);
    if (row.run !== null) tag(row.run);
    if (row.step !== null) tag("step " + row.step);
    if (row.source !== null) tag(row.source);
    if (row.reward !== null) tag("reward " + number(row.reward), row.reward > 0 ? "right" : "wrong");
    if (row.discrepancy !== null) tag("mean |p − q| " + number(row.discrepancy));
    if (row.advantage !== null) tag("advantage " + number(row.advantage));
    if (alike.length > 1) tag(`${alike.length} identical`);
    const first = row.title || (row.prompt || whole(row)).trim().split("\n")[0];
    head.appendChild(document.createTextNode(first.length > 90 ? first.slice(0, 90) + "…" : first));
    let built = false;
    const build = () => {
      if (built) return;
      built = true;
      if (row.prompt) { html("div", "label", box, "prompt"); plain(row.prompt, html("pre", "", box)); }
      html("div", "label", box, "completion");
      const text = html("pre", "", box);
      if (!row.tokens) {
        plain(row.text, text);
        if (row.more) html("span", "given", text, ` … ${row.more} more characters`);
      }
      else {
        row.tokens.forEach((id, t) => {
          const span = html("span", data.words[id].trim().replace(control, "") ? "" : "control", text, data.words[id]);
          if (row.p[t] === null) { span.className += " given"; span.title = "given, not sampled"; return; }
          const p = row.p[t] / data.unit, q = row.q[t] / data.unit;
          span.style.background = color(p, q);
          span.title = `p ${p.toFixed(5)}, q ${q.toFixed(5)}`;
          for (const [id, p, q] of row.top ? row.top[t] : [])
            span.title += `\n${JSON.stringify(data.words[id])} p ${(p / data.unit).toFixed(5)}, q ${(q / data.unit).toFixed(5)}`;
        });
        if (row.more) html("span", "given", text, ` … ${row.more} more tokens`);
      }
      if (row.found) { html("div", "label", box, "answer found"); html("pre", "", box, row.found); }
      if (row.answer) { html("div", "label", box, "reference answer"); html("pre", "", box, row.answer); }
    };
    box.addEventListener("toggle", build);
    return box;
  }

  function draw() {
    const rows = chosen(), groups = grouped(rows);
    list.className = get("plain").checked ? "plain" : "";
    list.textContent = "";
    get("count").textContent = `${rows.length} of ${data.rows.length} completions` + (data.left_out ? `; ${data.left_out} more are not on this page` : "");
    groups.slice(0, shown).map(card).slice(0, 1).forEach((box) => { box.open = true; });
    get("more").hidden = groups.length <= shown;
  }
  for (const input of document.querySelectorAll("#filters input, #filters select"))
    input.addEventListener("input", () => { shown = PAGE; draw(); });
  get("more").addEventListener("click", () => { shown += PAGE; draw(); });
  draw();
})();
