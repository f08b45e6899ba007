// Expected and actual tokens of one layer's experts in its newest step.

const MOST = 64;

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// The experts to show: all, or the busiest where there are too many; in the order of their ids.
export function chosen(actual, expected) {
  const experts = actual.map((_, expert) => expert);
  if (experts.length <= MOST) return experts;
  const weight = (e) => Math.max(actual[e], expected ? expected[e] : 0);
  return experts.sort((a, b) => weight(b) - weight(a)).slice(0, MOST).sort((a, b) => a - b);
}

export function drawLoads(canvas, detail) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  context.clearRect(0, 0, width, height);
  if (!detail?.actual) return;
  const { actual, expected } = detail;
  const experts = chosen(actual, expected);
  const most = Math.max(1, ...experts.map((e) => Math.max(actual[e], expected ? expected[e] : 0)));
  const [left, bottom] = [40, 20];
  const slot = (width - left) / experts.length;
  const y = (value) => height - bottom - (value / most) * (height - bottom - 8);
  context.font = "12px system-ui, sans-serif";
  context.fillStyle = variable("--muted");
  context.strokeStyle = variable("--line");
  for (const value of [0, most / 2, most]) {
    context.fillText(String(Math.round(value)), 2, y(value) + 4);
    context.beginPath();
    context.moveTo(left, y(value));
    context.lineTo(width, y(value));
    context.stroke();
  }
  const every = Math.max(1, Math.ceil(30 / slot));
  experts.forEach((expert, place) => {
    const x = left + place * slot;
    context.fillStyle = variable("--s1");
    context.fillRect(x + slot * 0.15, y(actual[expert]), Math.max(1, slot * 0.7), y(0) - y(actual[expert]));
    if (expected) {
      context.fillStyle = variable("--s2");
      context.fillRect(x, y(expected[expert]) - 1.5, slot, 3);
    }
    if (place % every === 0) {
      context.fillStyle = variable("--muted");
      context.fillText(String(expert), x + slot / 2 - 6, height - 4);
    }
  });
}
