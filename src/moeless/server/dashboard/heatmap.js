// A map of layers × experts on one canvas: a pixel per cell, scaled up without smoothing.

const STEPS = 256;

function channels(colour) {
  return [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
}

export function palette() {
  const style = getComputedStyle(document.documentElement);
  const stops = [0, 1, 2, 3, 4].map((i) => channels(style.getPropertyValue(`--heat${i}`).trim()));
  const table = new Uint32Array(STEPS);
  for (let i = 0; i < STEPS; i++) {
    const at = (i / (STEPS - 1)) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    const [r, g, b] = stops[low].map((value, c) => value + (at - low) * (stops[low + 1][c] - value));
    table[i] = (255 << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r);
  }
  return table;
}

export class HeatMap {
  constructor(canvas, legend, { onCell }) {
    this.canvas = canvas;
    this.legend = legend;
    this.onCell = onCell;
    this.cells = document.createElement("canvas");
    this.shape = [0, 0];
    this.cursor = { layer: 0, expert: 0 };
    this.hover = null;
    this.queued = false;
    this.repaint();
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerdown", (event) => this.choose(event));
    canvas.addEventListener("pointerleave", () => this.setHover(null));
    canvas.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  // Colours anew, after the theme changed.
  repaint() {
    this.palette = palette();
    const context = this.legend.getContext("2d");
    const image = context.createImageData(STEPS / 2, 10);
    const pixels = new Uint32Array(image.data.buffer);
    for (let i = 0; i < pixels.length; i++) pixels[i] = this.palette[2 * (i % (STEPS / 2))];
    context.putImageData(image, 0, 0);
    if (this.values) this.show(this.values, this.shape, this.rooted);
  }

  // Shows values [layers × experts], by their square root if ``rooted``; returns the largest.
  show(values, [layers, experts], rooted) {
    this.values = values;
    this.rooted = rooted;
    if (this.shape[0] !== layers || this.shape[1] !== experts) {
      this.shape = [layers, experts];
      this.cells.width = experts;
      this.cells.height = layers;
      const height = Math.max(layers * Math.max(4, Math.min(14, 480 / layers)), 40);
      this.canvas.style.height = `${Math.round(height)}px`;
      this.cursor.layer = Math.min(this.cursor.layer, layers - 1);
      this.cursor.expert = Math.min(this.cursor.expert, experts - 1);
    }
    let most = 0;
    for (const value of values) if (value > most) most = value;
    const scale = (STEPS - 1) / (rooted ? Math.sqrt(most || 1) : most || 1);
    const context = this.cells.getContext("2d");
    const image = context.createImageData(experts, layers);
    const pixels = new Uint32Array(image.data.buffer);
    for (let i = 0; i < pixels.length; i++) {
      const level = rooted ? Math.sqrt(values[i]) : values[i];
      pixels[i] = this.palette[Math.min(STEPS - 1, Math.round(level * scale))];
    }
    context.putImageData(image, 0, 0);
    this.draw();
    return most;
  }

  draw() {
    if (this.queued) return;
    this.queued = true;
    requestAnimationFrame(() => {
      this.queued = false;
      this.drawNow();
    });
  }

  drawNow() {
    const [layers, experts] = this.shape;
    if (!layers) return;
    const ratio = window.devicePixelRatio || 1;
    const width = Math.round(this.canvas.clientWidth * ratio);
    const height = Math.round(this.canvas.clientHeight * ratio);
    if (this.canvas.width !== width) this.canvas.width = width;
    if (this.canvas.height !== height) this.canvas.height = height;
    const context = this.canvas.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(this.cells, 0, 0, width, height);
    const style = getComputedStyle(document.documentElement);
    const frame = (cell, colour, line) => {
      context.strokeStyle = colour;
      context.lineWidth = line * ratio;
      const [w, h] = [width / experts, height / layers];
      context.strokeRect(cell.expert * w, cell.layer * h, Math.max(w, 3 * ratio), Math.max(h, 3 * ratio));
    };
    if (document.activeElement === this.canvas || !this.hover) {
      frame(this.cursor, style.getPropertyValue("--card"), 4);
      frame(this.cursor, style.getPropertyValue("--text"), 2);
    }
    if (this.hover) frame(this.hover, style.getPropertyValue("--text"), 1.5);
  }

  at(event) {
    const [layers, experts] = this.shape;
    const box = this.canvas.getBoundingClientRect();
    const clamp = (value, most) => Math.max(0, Math.min(most - 1, Math.floor(value * most)));
    return {
      layer: clamp((event.clientY - box.top) / box.height, layers),
      expert: clamp((event.clientX - box.left) / box.width, experts),
    };
  }

  point(event) {
    if (this.shape[0]) this.setHover(this.at(event));
  }

  setHover(cell) {
    const same = cell && this.hover && cell.layer === this.hover.layer && cell.expert === this.hover.expert;
    if (same) return;
    this.hover = cell;
    this.onCell(cell ?? this.cursor, false);
    this.draw();
  }

  choose(event) {
    if (!this.shape[0]) return;
    this.cursor = this.at(event);
    this.onCell(this.cursor, true);
    this.draw();
  }

  press(event) {
    const [layers, experts] = this.shape;
    const { layer, expert } = this.cursor;
    const goals = {
      ArrowLeft: [layer, expert - 1], ArrowRight: [layer, expert + 1],
      ArrowUp: [layer - 1, expert], ArrowDown: [layer + 1, expert],
      Home: [layer, 0], End: [layer, experts - 1],
      PageUp: [layer - 10, expert], PageDown: [layer + 10, expert],
    };
    const goal = goals[event.key];
    if (!goal || !layers) return;
    event.preventDefault();
    this.cursor = {
      layer: Math.max(0, Math.min(layers - 1, goal[0])),
      expert: Math.max(0, Math.min(experts - 1, goal[1])),
    };
    this.hover = null;
    this.onCell(this.cursor, true);
    this.draw();
  }
}
