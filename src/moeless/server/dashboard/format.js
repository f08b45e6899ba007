// Numbers as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export function count(value) {
  return value < 100000 ? whole.format(value) : compact.format(value);
}

export function number(value, digits = 2) {
  return value === null || Number.isNaN(value) ? "–" : value.toFixed(digits);
}

export function rate(value) {
  if (value === null) return "–";
  if (Number.isInteger(value)) return count(value);
  return value >= 100 ? count(value) : value.toFixed(value >= 10 ? 1 : 2);
}

export function seconds(value) {
  if (value === null) return "–";
  if (value >= 10) return `${value.toFixed(1)} s`;
  return value >= 1 ? `${value.toFixed(2)} s` : `${(1000 * value).toFixed(value >= 0.01 ? 0 : 2)} ms`;
}

export function bytes(value) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= size) return `${(value / size).toFixed(value >= 100 * size ? 0 : 2)} ${unit}`;
  }
  return `${Math.round(value)} B`;
}

export function percent(share, digits = 1) {
  return share === null || !Number.isFinite(share) ? "–" : `${(100 * share).toFixed(digits)}%`;
}

export function gbSeconds(value) {
  if (value < 1) return `${(1000 * value).toFixed(1)} mGB·s`;
  return value < 1000 ? `${value.toFixed(2)} GB·s` : `${compact.format(value)} GB·s`;
}
