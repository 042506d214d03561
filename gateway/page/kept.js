/** What this browser keeps: the player's name, the token of an invitation, and the wishes of stories told in this tab. */
export const kept = {
  get(store, key) {
    try { return JSON.parse(store().getItem(key)) ?? undefined; } catch { return undefined; }
  },
  set(store, key, value) {
    try { store().setItem(key, JSON.stringify(value)); } catch { /* a browser that keeps nothing still tells stories */ }
  },
};
export const tab = () => sessionStorage;
export const browser = () => localStorage;
