// This browser's store of the chat, in IndexedDB: conversations, and the images in them.
window.servekitStore = (() => {
  const STORES = ["conversations", "images"];
  /** Wait for a request, a transaction or a reader. */
  const settle = (request, done = "onsuccess") =>
    new Promise((resolve, reject) => {
      request[done] = () => resolve(request.result);
      request.onerror = request.onabort = () => reject(request.error);
    });
  const open = () => {
    const opening = indexedDB.open("servekit", 2);
    opening.onupgradeneeded = () => {
      const database = opening.result;
      for (const name of STORES) {
        if (!database.objectStoreNames.contains(name)) {
          database.createObjectStore(name, name === "images" ? undefined : { keyPath: "id" });
        }
      }
    };
    return settle(opening);
  };
  /** Call `act` with both stores, in one transaction; return its result once that is done. */
  const run = async (act, mode = "readonly") => {
    const database = await open();
    try {
      const transaction = database.transaction(STORES, mode);
      const done = settle(transaction, "oncomplete");
      done.catch(() => {}); // an error of `act` comes first
      const result = await act(...STORES.map((name) => transaction.objectStore(name)));
      await done;
      return result;
    } finally {
      database.close();
    }
  };
  const readDataUri = (blob) => {
    const reader = new FileReader();
    reader.readAsDataURL(blob);
    return settle(reader, "onload");
  };
  const makeId = () =>
    [...crypto.getRandomValues(new Uint8Array(16))]
      .map((byte) => byte.toString(16).padStart(2, "0")).join("");
  return { settle, run, readDataUri, makeId };
})();
