// Figures come in two colours, picked by the system's setting. A reader who turns the theme around gets the other one.
function follow() {
  const dark = document.body.getAttribute("data-md-color-scheme") === "slate"
  for (const source of document.querySelectorAll("picture source")) source.media = dark ? "all" : "not all"
}

new MutationObserver(follow).observe(document.body, { attributeFilter: ["data-md-color-scheme"] })
follow()
