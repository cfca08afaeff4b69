
// Starts the timelines, curves and buttons of the page, and marks when everything is drawn.
function start(root) {
  for (const box of root.querySelectorAll(".timeline")) new Timeline(box);
  for (const box of root.querySelectorAll(".curves")) new Plot(box);
  for (const button of root.querySelectorAll(".copy")) button.addEventListener("click", () => copy(button));
}

async function copy(button) {
  const source = document.getElementById(button.dataset.copies);
  const rows = source.rows ? [...source.rows].map((row) => [...row.cells].map((cell) => cell.textContent).join("\t")) : null;
  const text = rows ? rows.join("\n") : source.textContent;
  let done = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    getSelection().selectAllChildren(source);
    done = document.execCommand("copy") ? "Copied" : "Selected: press Ctrl-C";
  }
  button.textContent = done;
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}

// Marks the link to the section that is being read.
const reading = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const link = document.querySelector(`nav a[href="#${target.id}"]`);
    if (!link) continue;
    if (isIntersecting) link.setAttribute("aria-current", "true"); else link.removeAttribute("aria-current");
    const nav = link.parentElement;
    if (isIntersecting && nav.scrollWidth > nav.clientWidth) nav.scrollLeft = link.offsetLeft - nav.clientWidth / 2;
  }
}, { rootMargin: "-15% 0px -80% 0px" });

start(document);
for (const section of document.querySelectorAll("main > section")) reading.observe(section);
performance.mark("ready");
document.documentElement.dataset.ready = Math.round(performance.now());
