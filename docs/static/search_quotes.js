// A quote under each result of a search: the words around the first of the words that were searched.
const QUOTE_LENGTH = 240

const query = new URLSearchParams(window.location.search).get("q") || ""
const words = query.split(/[^\p{L}\p{N}_]+/u).filter(word => word)
const wanted = words.length ? new RegExp(`\\b(?:${words.join("|")})`, "i") : /(?!)/

function firstPlace(text) {
  return text.search(wanted)
}

function quote(page, anchor) {
  const sections = SEARCH_TEXTS[page] || []
  const named = sections.filter(([id]) => id === anchor)
  const texts = (named.length ? named : sections).map(([, text]) => text)
  const text = texts.find(item => firstPlace(item) >= 0) || texts.find(item => item) || ""
  const begin = Math.max(0, firstPlace(text) - QUOTE_LENGTH / 3)
  const end = begin + QUOTE_LENGTH
  // Whole words: the cut words at both ends are left out.
  let part = text.slice(begin, end)
  if (begin > 0) part = "… " + part.replace(/^\S*\s/, "")
  return end < text.length ? part.replace(/\s\S*$/, "") + " …" : part
}

function addQuote(item) {
  const link = item.querySelector("a")
  if (!link || item.querySelector(".search-quote")) return
  const root = new URL(document.documentElement.dataset.content_root, window.location.href)
  const url = new URL(link.href)
  const page = decodeURIComponent(url.pathname.slice(root.pathname.length)).replace(/\.html$/, "")
  const paragraph = document.createElement("p")
  paragraph.className = "search-quote"
  paragraph.textContent = quote(page, url.hash.slice(1))
  if (paragraph.textContent) item.append(paragraph)
}

document.addEventListener("DOMContentLoaded", () => {
  const results = document.querySelector("#search-results")
  if (!results) return
  // A section with the searched words in its title comes before pages that have the words in their text.
  Scorer.score = ([, , , , score, , kind]) => kind === "title" ? score + Scorer.title : score
  const addQuotes = () => results.querySelectorAll("li").forEach(addQuote)
  new MutationObserver(addQuotes).observe(results, {childList: true, subtree: true})
  addQuotes()
})
