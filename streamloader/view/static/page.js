// The pages work without this: it loads parts of a page, sends what sliders say, and follows the arrow keys.
"use strict";

async function load(target, address) {
  target.setAttribute("aria-busy", "true");
  try {
    const response = await fetch(address, { credentials: "same-origin" });
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    const part = page.querySelector("[data-part]") || page.querySelector(".problem");
    if (part) target.replaceChildren(document.adoptNode(part));
    showTimes();
  } catch (error) {
    target.textContent = "the server has ended";
  }
  target.removeAttribute("aria-busy");
}

async function loadParts() {
  for (const target of document.querySelectorAll("[data-load]")) await load(target, target.dataset.load);
}

function refresh(target) {
  setInterval(() => {
    // not again while the last one waits: a browser has few connections to a server
    if (!document.hidden && !target.hasAttribute("aria-busy")) load(target, target.dataset.refresh);
  }, 1000 * Number(target.dataset.seconds));
}

function showTimes() {
  for (const time of document.querySelectorAll("[data-time]")) {
    time.textContent = `${Math.max(0, Math.round(Date.now() / 1000 - Number(time.dataset.time)))} s ago`;
  }
}

// a slider sets its number by powers of two
function prepare(form) {
  let timer = 0;
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(() => forecast(form), 200);
  };
  for (const slider of form.querySelectorAll("[type=range]")) {
    const number = slider.nextElementSibling;
    const place = () => (slider.value = Math.round(Math.log2(Number(number.value) || 1)));
    slider.hidden = false;
    place();
    slider.addEventListener("input", () => {
      number.value = 2 ** Number(slider.value);
      later();
    });
    number.addEventListener("input", () => {
      place();
      later();
    });
  }
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    forecast(form);
  });
}

function forecast(form) {
  const query = new URLSearchParams();
  for (const number of form.querySelectorAll("[type=number]")) {
    if (number.value !== number.dataset.value && number.value) query.set(number.name, number.value);
  }
  load(document.getElementById("plan"), `/plan?${query}`);
}

document.addEventListener("keydown", (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, select, textarea, video, audio")) return;
  const relation = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  const link = relation && document.querySelector(`a[rel=${relation}]`);
  if (link) link.click();
});

for (const form of document.querySelectorAll("[data-plan]")) prepare(form);
for (const target of document.querySelectorAll("[data-refresh]")) refresh(target);
showTimes();
loadParts();
