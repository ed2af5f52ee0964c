// Keeps a page as it is now: on an event its parts are fetched anew, at most once a second and a tenth of the time, so
// that a large site does not pay for who looks; and every ten seconds without an event. Nothing is asked while nobody looks. Without this file the page says its time, and is right as of then.
"use strict";
(() => {
  const LEAST_MS = 1000, LEAST_SHARE = 10, MOST_MS = 10000, RETRY_MS = 1000, RETRY_MS_MAX = 30000;
  const said = new TextDecoder();
  let stop = new AbortController(), due = 0, last = 0, least = LEAST_MS, retry = RETRY_MS, wanted = false, busy = false, round = 0;

  const say = (text, lost) => {
    const live = document.getElementById("live");
    if (live && live.textContent !== text) live.textContent = text;
    if (live) live.classList.toggle("lost", Boolean(lost));
  };

  const later = (wait, number) => {
    clearTimeout(due);
    due = setTimeout(() => refresh(number), wait);
  };

  const soon = (number) => {
    if (busy) wanted = true;
    else later(Math.max(0, last + least - performance.now()), number);
  };

  async function refresh(number) {
    if (busy || number !== round) return;
    busy = true;
    wanted = false;
    last = performance.now();
    try {
      const answer = await fetch(location.href, { redirect: "manual", cache: "no-store", signal: stop.signal });
      if (answer.type === "opaqueredirect") return location.reload(); // another replica leads: go there
      if (!answer.ok) throw new Error(String(answer.status));
      replace(new DOMParser().parseFromString(await answer.text(), "text/html"));
      retry = RETRY_MS;
      least = Math.max(LEAST_MS, LEAST_SHARE * (performance.now() - last));
      say("It is kept up to date.");
      later(wanted ? least : Math.max(least, MOST_MS), number);
    } catch {
      lost(number);
    } finally {
      busy = false;
    }
  }

  function lost(number) {
    if (number !== round) return;
    const wait = retry * (0.75 + Math.random() / 2);
    retry = Math.min(2 * retry, RETRY_MS_MAX);
    say("Connection lost: this is how it was then. Trying again; the other replicas show the same.", true);
    later(wait, number);
  }

  // Parts that differ are put in place of the old ones; what had the focus has it again.
  function replace(found) {
    for (const part of found.querySelectorAll("[data-part]")) {
      const old = document.getElementById(part.id);
      if (part.id === "as-of" && old) part.querySelector("#live").replaceWith(old.querySelector("#live").cloneNode(true));
      if (!old) document.getElementById("main").prepend(part);
      else if (old.innerHTML !== part.innerHTML) {
        const scrolled = [...old.querySelectorAll(".region")].map((one) => one.scrollLeft);
        const focus = old.contains(document.activeElement) ? key(document.activeElement) : null;
        old.replaceWith(part);
        [...part.querySelectorAll(".region")].forEach((one, place) => { one.scrollLeft = scrolled[place] || 0; });
        if (focus) [...part.querySelectorAll("a, [tabindex]")].find((one) => key(one) === focus)?.focus({ preventScroll: true });
      }
    }
    if (!found.getElementById("banner")) document.getElementById("banner")?.remove();
  }

  const key = (one) => `${one.tagName} ${one.getAttribute("href")} ${one.getAttribute("aria-label")}`;

  // The stream names each event, so it is read as it comes: what is no comment is news.
  async function follow(number) {
    while (number === round) {
      try {
        const answer = await fetch("/v1/events", { cache: "no-store", signal: stop.signal });
        if (!answer.ok) throw new Error(String(answer.status));
        const reader = answer.body.getReader();
        for (let part = await reader.read(); !part.done; part = await reader.read()) {
          if (/^event:/m.test(said.decode(part.value))) soon(number);
        }
      } catch {
        if (number !== round) return;
      }
      await new Promise((go) => setTimeout(go, retry * (0.75 + Math.random() / 2)));
    }
  }

  function begin() {
    end();
    if (document.hidden) return;
    stop = new AbortController();
    follow(round);
    later(0, round);
  }

  function end() {
    round += 1;
    clearTimeout(due);
    stop.abort();
  }

  document.addEventListener("visibilitychange", begin);
  addEventListener("pagehide", end);
  addEventListener("pageshow", begin);
})();
