// Updates the page: its parts are fetched again on an event, at most once a second and a tenth of the time, so that
// watching costs a large site little; and every ten seconds without an event. A hidden page requests nothing.
// Without this file the page shows the time of its data.
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
      say(`Live from ${document.getElementById("live").dataset.source}`);
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
    say("Connection lost; retrying. Other replicas show the same page.", true);
    later(wait, number);
  }

  // Replace the parts that differ, and keep focus, scroll position, open lists and the status line's element.
  function replace(found) {
    for (const part of found.querySelectorAll("[data-part]")) {
      const old = document.getElementById(part.id);
      if (part.id === "as-of" && old) {
        const live = old.querySelector("#live"), found = part.querySelector("#live");
        live.dataset.source = found.dataset.source;
        found.replaceWith(live.cloneNode(true));
      }
      if (!old) document.getElementById("main").prepend(part);
      else if (old.innerHTML !== part.innerHTML) {
        const scrolled = [...old.querySelectorAll(".region")].map((one) => one.scrollLeft);
        const opened = [...old.querySelectorAll("details")].map((one) => one.open);
        const focus = old.contains(document.activeElement) ? key(document.activeElement) : null;
        old.replaceWith(part);
        [...part.querySelectorAll(".region")].forEach((one, place) => { one.scrollLeft = scrolled[place] || 0; });
        [...part.querySelectorAll("details")].forEach((one, place) => { one.open = Boolean(opened[place]); });
        if (focus) [...part.querySelectorAll("a, [tabindex]")].find((one) => key(one) === focus)?.focus({ preventScroll: true });
      }
    }
    unlink();
    if (!found.getElementById("banner")) document.getElementById("banner")?.remove();
  }

  const key = (one) => `${one.tagName} ${one.getAttribute("href")} ${one.getAttribute("aria-label")}`;

  // Only the names of events matter: everything that is no comment is news.
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

  // A redirect of a form to the leader would be blocked by the policy, one of a plain navigation is not.
  document.addEventListener("submit", (event) => {
    event.preventDefault();
    const fields = [...new FormData(event.target)].filter(([, value]) => value !== "");
    location.assign(`${event.target.action}?${new URLSearchParams(fields)}`);
  });

  // Behind `forebay page` the browser has no certificate for other replicas, and needs none: any of them answers.
  const unlink = () => {
    if (location.protocol === "https:") return;
    for (const one of document.querySelectorAll("a[href^='https:']")) one.removeAttribute("href");
  };

  document.addEventListener("visibilitychange", begin);
  addEventListener("pagehide", end);
  addEventListener("pageshow", begin);
  unlink();
})();
