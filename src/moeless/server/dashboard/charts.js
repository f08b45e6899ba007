// Lines over time (uPlot), each with a legend of its values and a table for those who cannot see it.

import { fillTable } from "./tables.js";

const HEIGHT = 190;

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function clock(seconds) {
  return new Date(1000 * seconds).toLocaleTimeString([], { hour12: false });
}

function known(value) {
  return value !== null && value !== undefined;
}

export class TimeChart {
  // lines: [{ name, label, colour, dash? }]; show: value → text; floor: where the axis begins.
  constructor(host, lines, show, floor = 0) {
    this.host = host;
    this.lines = lines;
    this.show = show;
    this.floor = floor;
    this.title = document.getElementById(host.closest("section").getAttribute("aria-labelledby")).textContent;
    this.canvas = document.createElement("div");
    this.canvas.className = "chart";
    this.canvas.setAttribute("role", "img");
    this.legend = document.createElement("ul");
    this.legend.className = "series";
    this.values = lines.map((line) => this.addEntry(line));
    this.details = document.createElement("details");
    const scroll = document.createElement("div");
    const summary = document.createElement("summary");
    this.table = document.createElement("table");
    summary.textContent = `Table: ${this.title.toLowerCase()}`;
    scroll.className = "scroll";
    scroll.append(this.table);
    this.details.append(summary, scroll);
    host.append(this.canvas, this.legend, this.details);
    this.data = [[], ...lines.map(() => [])];
    this.pointed = null;
    this.details.addEventListener("toggle", () => this.fill());
    new ResizeObserver(() => this.fit()).observe(host);
    this.repaint();
  }

  addEntry(line) {
    const entry = document.createElement("li");
    const swatch = document.createElement("span");
    const value = document.createElement("b");
    swatch.className = "swatch";
    swatch.style.borderTopColor = `var(${line.colour})`;
    swatch.style.borderTopStyle = line.dash ? (line.dash[0] < 3 ? "dotted" : "dashed") : "solid";
    entry.append(swatch, `${line.label} `, value);
    this.legend.append(entry);
    return value;
  }

  // Makes the plot anew, after the theme changed.
  repaint() {
    this.plot?.destroy();
    const [text, grid] = [variable("--muted"), variable("--line")];
    const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
    const span = (_, low, high) => {
      const most = known(high) ? Math.max(high, this.floor) : this.floor;
      return [this.floor, most > this.floor ? most + 0.1 * (most - this.floor) : this.floor + 1];
    };
    this.plot = new window.uPlot(
      {
        width: Math.max(this.host.clientWidth, 100),
        height: HEIGHT,
        legend: { show: false },
        cursor: { drag: { x: false, y: false }, points: { size: 7 } },
        scales: { y: { range: span } },
        axes: [
          { ...axis, space: 90, values: (_, ticks) => ticks.map(clock) },
          { ...axis, size: 76, values: (_, ticks) => ticks.map((tick) => this.show(tick)) },
        ],
        series: [
          {},
          ...this.lines.map((line) => ({
            stroke: variable(line.colour),
            width: 2,
            dash: line.dash,
            spanGaps: true,
            points: { show: false },
          })),
        ],
        hooks: { setCursor: [(plot) => { this.pointed = plot.cursor.idx ?? null; this.label(); }] },
      },
      this.data,
      this.canvas,
    );
  }

  fit() {
    const width = this.host.clientWidth;
    if (width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  text(value) {
    return known(value) ? this.show(value) : "–";
  }

  // Values at the pointer, else the newest.
  label() {
    this.values.forEach((element, i) => {
      const values = this.data[i + 1];
      element.textContent = this.text(this.pointed === null ? values.at(-1) : values[this.pointed]);
    });
  }

  update(history) {
    this.data = [history.times, ...this.lines.map((line) => history.series[line.name] ?? [])];
    this.plot.setData(this.data);
    this.label();
    const newest = this.lines.map((line, i) => `${line.label} ${this.text(this.data[i + 1].at(-1))}`);
    this.canvas.setAttribute("aria-label", `${this.title}, newest values: ${newest.join(", ")}`);
    this.fill();
  }

  fill() {
    if (!this.details.open) return;
    const [times, ...columns] = this.data;
    const rows = [];
    for (let i = times.length - 1; i >= Math.max(0, times.length - 15); i--) {
      rows.push([clock(times[i]), ...columns.map((values) => this.text(values[i]))]);
    }
    fillTable(this.table, ["time", ...this.lines.map((line) => line.label)], rows);
  }
}
