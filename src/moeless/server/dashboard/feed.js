// Asks the server once a second, with the key where one is needed, and unpacks the arrays.

const KEY = "moeless-key";
const TYPES = { uint8: Uint8Array, uint32: Uint32Array };

function unpack(packed) {
  const text = atob(packed.base64);
  const raw = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) raw[i] = text.charCodeAt(i);
  return new TYPES[packed.type](raw.buffer);
}

export class NeedsKey extends Error {}

export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

export async function ask(layer, timeoutMs) {
  const key = sessionStorage.getItem(KEY);
  const response = await fetch(`/moeless/live?layer=${layer}`, {
    headers: key ? { Authorization: `Bearer ${key}` } : {},
    cache: "no-store",
    signal: AbortSignal.timeout(timeoutMs),
  });
  if (response.status === 401) {
    sessionStorage.removeItem(KEY);
    throw new NeedsKey(key ? "This key is not valid." : "");
  }
  if (!response.ok) {
    let reason = `status ${response.status}`;
    try {
      reason = (await response.json()).error.message;
    } catch { /* not ours: a proxy's page */ }
    throw new Error(reason);
  }
  const state = await response.json();
  for (const name of ["tokens", "replicas", "planned"]) state[name] = unpack(state[name]);
  return state;
}
