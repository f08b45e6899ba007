// What the counters did between two answers, and the last ten minutes of it.

const KEPT = 600;

function per(seconds, now, before) {
  return seconds > 0 && now >= before ? (now - before) / seconds : null;
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

// Mean ratio over the layer-steps between two answers; null if there was none.
function meanBetween(now, before, name) {
  if (!now[name] || !before[name]) return null;
  const steps = sum(now.layer_steps) - sum(before.layer_steps);
  return steps > 0 ? (sum(now[name]) - sum(before[name])) / steps : null;
}

export class History {
  constructor() {
    this.times = [];
    this.series = {};
    this.last = null;
    this.recent = null;
  }

  // Takes an answer, and the figures of the time since the one before.
  take(state) {
    const before = this.last;
    this.last = state;
    // Another model, or a server that began anew: its counters begin at zero.
    const same = before && before.model === state.model
      && before.tokens.length === state.tokens.length && before.steps <= state.steps;
    if (!same) {
      this.times.length = 0;
      this.series = {};
      this.recent = new Float32Array(state.tokens.length);
      return;
    }
    const elapsed = state.time_s - before.time_s;
    if (elapsed <= 0) return;
    this.takeTokens(state, before, elapsed);
    const figures = {
      tokens: per(elapsed, state.requests.generated_tokens, before.requests.generated_tokens),
      running: state.requests.running,
      waiting: state.requests.waiting,
      ours: meanBetween(state, before, "straggler_sum"),
      fixed: meanBetween(state, before, "static_sum"),
      oracle: 1,
      cold: per(elapsed, state.cold_starts, before.cold_starts),
      blocking: per(elapsed, state.blocking_loads, before.blocking_loads),
      evictions: per(elapsed, state.evictions, before.evictions),
      warm: per(elapsed, state.warm_starts, before.warm_starts),
      billed: per(elapsed, state.gb_s.billed, before.gb_s.billed),
      resident: per(elapsed, state.gb_s.resident, before.gb_s.resident),
      reserved: per(elapsed, state.gb_s.reserved, before.gb_s.reserved),
      ttft50: state.requests.ttft.count ? state.requests.ttft.p50_s : null,
      ttft99: state.requests.ttft.count ? state.requests.ttft.p99_s : null,
      tpot50: state.requests.tpot.count ? state.requests.tpot.p50_s : null,
      tpot99: state.requests.tpot.count ? state.requests.tpot.p99_s : null,
    };
    this.push(state.time_s, figures);
  }

  // A mean over about five seconds, so that the map does not flicker.
  takeTokens(state, before, elapsed) {
    const keep = Math.exp(-elapsed / 5);
    const { recent } = this;
    for (let i = 0; i < recent.length; i++) {
      // Counters wrap around at 2^32; the difference of two does not mind.
      const grown = (state.tokens[i] - before.tokens[i]) >>> 0;
      recent[i] = keep * recent[i] + ((1 - keep) * grown) / elapsed;
    }
  }

  push(time, figures) {
    this.times.push(time);
    for (const [name, value] of Object.entries(figures)) (this.series[name] ??= []).push(value);
    if (this.times.length > KEPT) {
      this.times.shift();
      for (const values of Object.values(this.series)) values.shift();
    }
  }
}
