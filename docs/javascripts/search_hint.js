// A browser does not let a page that was opened as a file read the search index. Say so, instead of finding nothing.
if (location.protocol === "file:") {
  for (const button of document.querySelectorAll(".md-search__button")) {
    const hint = document.createElement("small");
    hint.textContent = "Search needs a web server";
    hint.title = "Run: python3 -m http.server --directory target/docs, and open http://localhost:8000";
    button.replaceWith(hint);
  }
}
