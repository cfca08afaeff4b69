
// Starts the timelines and buttons of the page, and marks when everything is drawn.
function start(root) {
  for (const box of root.querySelectorAll(".timeline")) new Timeline(box);
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

start(document);
performance.mark("ready");
document.documentElement.dataset.ready = Math.round(performance.now());
