// The operator's key. It stays in this tab, and is forgotten when the tab is closed.

const KEY = "tandem.key"; // in sessionStorage

export function savedKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function saveKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function forgetKey() {
  sessionStorage.removeItem(KEY);
}

/** The headers of a request with the key, if there is one. */
export function authorization(key = savedKey()) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}
