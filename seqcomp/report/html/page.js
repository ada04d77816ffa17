// Printed pages show what is folded on the screen, and fold it again.
(() => {
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach((item) => { item.open = true; });
  });
  addEventListener("afterprint", () => { opened.forEach((item) => { item.open = false; }); });
})();
