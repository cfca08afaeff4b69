
// Asks the page's own server for updates and replaces the sections that changed; details that are open stay open.
const CONTROLS = "button, input, svg[tabindex]";
async function refresh() {
  let text;
  try {
    const answer = await fetch(location.pathname, { cache: "no-store" });
    if (!answer.ok) throw new Error(String(answer.status));
    text = await answer.text();
  } catch {
    document.documentElement.dataset.lost = "yes";
    return setTimeout(refresh, 5000);
  }
  delete document.documentElement.dataset.lost;
  const news = new DOMParser().parseFromString(text, "text/html"), main = document.getElementById("main");
  const parts = [...news.querySelectorAll("main > section")];
  for (const part of parts) {
    const old = document.getElementById(part.id);
    const arriving = part.outerHTML;
    if (old && (old.arrived ?? "") === arriving) continue;
    const open = old ? [...old.querySelectorAll("details")].map((item) => item.open) : [];
    const fresh = document.importNode(part, true);
    [...fresh.querySelectorAll("details")].forEach((item, at) => { item.open = Boolean(open[at]); });
    const active = old && old.contains(document.activeElement) ? document.activeElement : null;
    if (active && !active.closest(".curves")) continue; // what is being read is left alone
    const place = active ? [...old.querySelectorAll(CONTROLS)].indexOf(active) : -1;
    if (old) old.replaceWith(fresh); else main.append(fresh);
    fresh.arrived = arriving;
    start(fresh);
    reading.observe(fresh);
    fresh.querySelectorAll(CONTROLS)[place]?.focus();
  }
  for (const old of [...main.children]) if (!parts.some((part) => part.id === old.id)) old.remove();
  const nav = document.querySelector("nav"), links = news.querySelector("nav");
  if (nav.textContent !== links.textContent) nav.replaceWith(document.importNode(links, true));
  document.documentElement.dataset.updates = Number(document.documentElement.dataset.updates || 0) + 1;
  const poll = Number(news.documentElement.dataset.poll || 0);
  if (poll) setTimeout(refresh, poll * 1000); // a finished run has no more updates
}
for (const part of document.querySelectorAll("main > section")) part.arrived = part.outerHTML;
setTimeout(refresh, Number(document.documentElement.dataset.poll) * 1000);
