// Elements with attributes, classes, listeners and children, in one call.
export function make(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [property, value] of Object.entries(properties)) {
    if (property.startsWith("on")) made.addEventListener(property.slice(2), value);
    else if (property in made && !property.includes("-")) made[property] = value;
    else made.setAttribute(property, value);
  }
  made.append(...children);
  return made;
}

export const button = (label, onclick, more = {}) => make("button", { type: "button", onclick, ...more }, label);
