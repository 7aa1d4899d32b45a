"use strict";
// Server-sent events by fetch: EventSource cannot send a token. Tries again for as long as the page is open.
// Servers send something every 20 seconds at least.
const LONGEST_PAUSE_MS = 30000;
const SILENCE_MS = 60000;
const FAULT = "an update cannot be shown; see the browser's console";

function attempt(work, onFault) {
  try {
    work();
  } catch (error) {
    console.error(error);
    onFault();
  }
}

async function readEvents(path, token, { onUpdate, onOpen, onFault }) {
  const ended = new AbortController();
  let watch = 0;
  const heard = () => {
    clearTimeout(watch);
    watch = setTimeout(() => ended.abort(), SILENCE_MS);
  };
  try {
    heard();
    const answer = await fetch(path, {
      headers: token ? { Authorization: `Bearer ${token}` } : {}, cache: "no-store", signal: ended.signal,
    });
    if (!answer.ok) return answer.status;
    onOpen();
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return 0;
      heard();
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const line = part.split("\n").find((one) => one.startsWith("data: "));
        if (!line) continue;
        // A fault of the page is no lost connection, and is not mended by another one.
        attempt(() => onUpdate(JSON.parse(line.slice(6))), onFault);
      }
    }
  } catch (error) {
    return 0;
  } finally {
    clearTimeout(watch);
  }
}

async function follow(path, token, handlers) {
  let pause = 1000;
  for (;;) {
    const status = await readEvents(path, token, {
      ...handlers, onOpen: () => { pause = 1000; handlers.onOpen(); },
    });
    if (status === 401) return "refused";
    handlers.onAway(status);
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
  }
}
