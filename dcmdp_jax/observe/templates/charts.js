"use strict";
// Draws the figures of a page: each panel an SVG with axes, a tooltip at the nearest step, zoom by dragging, reset by a
// double click or Escape. All data stand in the page; nothing is requested.
(function () {
  const NS = "http://www.w3.org/2000/svg";
  const make = (name, attributes, parent, text) => {
    const node = document.createElementNS(NS, name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  };
  const html = (name, className, parent, text) => {
    const node = document.createElement(name);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    if (parent) parent.appendChild(node);
    return node;
  };
  const show = (value, percent) => {
    if (value === null) return "not finite";
    if (percent) return (100 * value).toFixed(1) + "%";
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(+value.toPrecision(4));
  };
  const ticks = (low, high, count) => {
    const rough = (high - low) / count, power = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) || rough;
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step && found.length < 50; i++) found.push(i * step);
    return found;
  };
  const logTicks = (low, high) => {
    const found = [];
    for (let p = Math.ceil(Math.log10(low) - 1e-9); p <= Math.log10(high) + 1e-9; p++) found.push(Math.pow(10, p));
    return found;
  };

  function panel(spec, host) {
    const box = html("div", "panel", host);
    if (spec.title) html("div", "panel-title", box, spec.title);
    const frame = html("div", "panel-frame", box);
    const tip = html("div", "tip", frame);
    const legend = html("div", "legend", box);
    const named = [...spec.lines, ...spec.areas, ...spec.bars, ...spec.points].filter((item) => item.label);
    const seen = new Set();
    for (const item of named) {
      if (seen.has(item.label)) continue;
      seen.add(item.label);
      const entry = html("span", "entry", legend);
      const swatch = html("i", item.dash && item.dash.length ? "swatch dashed" : "swatch", entry);
      swatch.style.color = item.color;
      entry.appendChild(document.createTextNode(item.label));
    }
    let view = spec.xlim.slice(), svg = null, width = 0;
    const height = spec.rows.length > 4 ? 60 + 34 * spec.rows.length : 240;
    const ylim = spec.ylim;

    function scales() {
      const left = spec.rows.length ? Math.min(120, 12 + 7 * Math.max(...spec.rows.map((r) => r[1].length))) : 58;
      const area = { left, right: width - 10, top: 8, bottom: height - 34 };
      const scale = (limits, log, from, to) => {
        const f = log ? Math.log10 : (v) => v, a = f(limits[0]), b = f(limits[1]);
        const forth = (v) => from + ((f(v) - a) / (b - a || 1)) * (to - from);
        const back = (p) => { const v = a + ((p - from) / (to - from || 1)) * (b - a); return log ? Math.pow(10, v) : v; };
        return { forth, back };
      };
      return { area, x: scale(view, spec.log[0], area.left, area.right), y: scale(ylim, spec.log[1], area.bottom, area.top) };
    }

    function draw() {
      width = frame.clientWidth;
      if (!width) return;
      if (svg) svg.remove();
      const { area, x, y } = scales();
      const id = "clip" + Math.random().toString(36).slice(2);
      svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.title || spec.y }, null);
      frame.insertBefore(svg, tip);
      const clip = make("clipPath", { id }, make("defs", {}, svg));
      make("rect", { x: area.left, y: area.top - 4, width: Math.max(0, area.right - area.left), height: area.bottom - area.top + 8 }, clip);
      const low = Math.min(ylim[0], ylim[1]), high = Math.max(ylim[0], ylim[1]);
      if (spec.rows.length) {
        for (const [at, text] of spec.rows) make("text", { x: area.left - 6, y: y.forth(at) + 4, class: "tick end" }, svg, text.length > 16 ? text.slice(0, 15) + "…" : text);
      } else {
        for (const at of spec.log[1] ? logTicks(low, high) : ticks(low, high, 5)) {
          make("line", { x1: area.left, x2: area.right, y1: y.forth(at), y2: y.forth(at), class: "grid" }, svg);
          make("text", { x: area.left - 6, y: y.forth(at) + 4, class: "tick end" }, svg, show(at, spec.percent));
        }
      }
      for (const at of spec.log[0] ? logTicks(view[0], view[1]) : ticks(view[0], view[1], Math.max(2, Math.floor(width / 90))))
        make("text", { x: x.forth(at), y: area.bottom + 15, class: "tick middle" }, svg, show(at));
      make("line", { x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom, class: "axis" }, svg);
      if (spec.x) make("text", { x: (area.left + area.right) / 2, y: height - 4, class: "tick middle" }, svg, spec.x);
      const inside = make("g", { "clip-path": `url(#${id})` }, svg);
      for (const item of spec.areas) make("polygon", { points: item.data.filter((p) => p[1] !== null).map((p) => `${x.forth(p[0])},${y.forth(p[1])}`).join(" "), fill: item.color, opacity: item.opacity }, inside);
      for (const item of spec.bars) {
        const [bx, by, bw, bh] = item.box;
        const xs = [x.forth(bx), x.forth(bx + bw)], ys = [y.forth(by), y.forth(by + bh)];
        const bar = make("rect", { x: Math.min(...xs), y: Math.min(...ys), width: Math.abs(xs[1] - xs[0]), height: Math.abs(ys[1] - ys[0]), fill: item.color }, inside);
        make("title", {}, bar, `${item.label || ""} ${show(spec.rows.length ? bw : by + bh, spec.percent)}`.trim());
      }
      for (const item of spec.points)
        for (const [px, py] of item.data) if (px !== null && py !== null) make("circle", { cx: x.forth(px), cy: y.forth(py), r: 1.6, fill: item.color, opacity: item.opacity }, inside);
      for (const item of spec.lines) {
        const style = { fill: "none", stroke: item.color, "stroke-width": item.width, opacity: item.opacity, "stroke-linejoin": "round" };
        if (item.dash.length) style["stroke-dasharray"] = item.dash.join(" ");
        if (item.level !== null) { make("line", { ...style, x1: area.left, x2: area.right, y1: y.forth(item.level), y2: y.forth(item.level) }, inside); continue; }
        let path = "", pen = "M";
        for (const [px, py] of item.data) {
          if (px === null || py === null) { pen = "M"; continue; }
          path += `${pen}${x.forth(px).toFixed(1)} ${y.forth(py).toFixed(1)}`; pen = "L";
        }
        make("path", { ...style, d: path }, inside);
        if (item.marker) for (const [px, py] of item.data) if (py !== null) make("circle", { cx: x.forth(px), cy: y.forth(py), r: 3.2, fill: item.color, stroke: "#fff" }, inside);
      }
      const cursor = make("line", { y1: area.top, y2: area.bottom, class: "cursor", visibility: "hidden" }, svg);
      const drag = make("rect", { y: area.top, height: area.bottom - area.top, class: "drag", visibility: "hidden" }, svg);
      interact(area, x, cursor, drag);
    }

    function interact(area, x, cursor, drag) {
      const curves = spec.lines.filter((item) => item.label && item.level === null && item.data.length);
      let start = null;
      const place = (event) => event.clientX - svg.getBoundingClientRect().left;
      svg.addEventListener("pointermove", (event) => {
        const at = Math.max(area.left, Math.min(area.right, place(event)));
        if (start !== null) {
          drag.setAttribute("x", Math.min(start, at)); drag.setAttribute("width", Math.abs(at - start));
          drag.setAttribute("visibility", "visible");
          return;
        }
        if (!curves.length) return;
        const wanted = x.back(at);
        let nearest = null;
        for (const curve of curves) for (const [px] of curve.data)
          if (px !== null && (nearest === null || Math.abs(px - wanted) < Math.abs(nearest - wanted))) nearest = px;
        tip.textContent = "";
        html("b", "", tip, `${spec.x || "x"} ${show(nearest)}`);
        for (const curve of curves) {
          const found = curve.data.find((p) => p[0] === nearest);
          if (!found) continue;
          const row = html("div", "", tip);
          html("i", "swatch", row).style.color = curve.color;
          row.appendChild(document.createTextNode(`${curve.label}: ${show(found[1], spec.percent)}`));
        }
        cursor.setAttribute("x1", x.forth(nearest)); cursor.setAttribute("x2", x.forth(nearest));
        cursor.setAttribute("visibility", "visible");
        tip.style.display = "block";
        const beside = x.forth(nearest) + 12;
        tip.style.left = Math.max(0, beside + tip.offsetWidth > width ? x.forth(nearest) - 12 - tip.offsetWidth : beside) + "px";
      });
      const hide = () => { tip.style.display = "none"; cursor.setAttribute("visibility", "hidden"); };
      svg.addEventListener("pointerleave", () => { if (start === null) hide(); });
      svg.addEventListener("pointerdown", (event) => {
        if (event.pointerType === "touch" || spec.rows.length) return;
        start = Math.max(area.left, Math.min(area.right, place(event))); hide();
        svg.setPointerCapture(event.pointerId);
      });
      svg.addEventListener("pointerup", (event) => {
        if (start === null) return;
        const end = Math.max(area.left, Math.min(area.right, place(event))), from = start;
        start = null; drag.setAttribute("visibility", "hidden");
        if (Math.abs(end - from) > 8) { view = [x.back(Math.min(from, end)), x.back(Math.max(from, end))]; draw(); }
      });
      svg.addEventListener("dblclick", () => { view = spec.xlim.slice(); draw(); });
    }

    new ResizeObserver(() => { if (frame.clientWidth !== width) draw(); }).observe(frame);
    draw();
  }

  for (const host of document.querySelectorAll("[data-figure]")) {
    const spec = JSON.parse(document.getElementById(host.dataset.figure).textContent);
    const grid = html("div", spec.panels.length > 1 ? "panels" : "panels one", host);
    for (const each of spec.panels) panel(each, grid);
  }
})();
