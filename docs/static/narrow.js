// Pages on a narrow screen: long names may break at their parts, and a row of a table of sentences is a block.
const NAMES = ":is(h1, h2, h3, h4, td, th, p code, li code, p a, li a, p strong, dt)"
// Behind "_", ".", "/", "=" and "(" of a name, and before the capital letter that begins a part of it.
const PART = /(?<=[A-Za-z_][_./=(])(?=[\w"'])|(?<=[a-z])(?=[A-Z][a-z])|(?<=[A-Z])(?=[A-Z][a-z])/
// With more characters in a cell beside the first, a column would have a word or two on a line.
const [COLUMNS, LONG_CELL] = [3, 50]

function addBreaks(element) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT)
  const texts = []
  while (walker.nextNode()) texts.push(walker.currentNode)
  for (const text of texts) {
    const parts = text.data.split(PART)
    if (parts.length > 1) text.replaceWith(...parts.flatMap((part, i) => i ? [document.createElement("wbr"), part] : [part]))
  }
}

function nameCells(table) {
  const titles = [...table.querySelectorAll("thead th")].map(cell => cell.innerText.trim())
  const cells = [...table.querySelectorAll("tbody td")]
  if (titles.length < COLUMNS || !cells.some(cell => cell.cellIndex && cell.innerText.length > LONG_CELL)) return
  table.classList.add("rows-as-blocks")
  for (const cell of cells) cell.dataset.title = titles[cell.cellIndex]
}

document.addEventListener("DOMContentLoaded", () => {
  const article = document.querySelector(".bd-article")
  if (!article) return
  article.querySelectorAll("table").forEach(nameCells)
  article.querySelectorAll(NAMES).forEach(addBreaks)
})
