// Numbers as people read them. Unknown values are an en dash, never zero.
const NONE = "–";

export const number = (value, digits = 3) => {
  if (value === null || value === undefined) return NONE;
  const size = Math.abs(value);
  if (size !== 0 && (size < 10 ** -digits || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumFractionDigits: size >= 1000 ? 0 : size >= 100 ? Math.min(1, digits) : digits, minimumFractionDigits: size < 100 ? digits : 0 });
};
export const loss = (value) => number(value, 4);
export const whole = (value) => (value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en"));
export const rate = (value) => (value === null || value === undefined ? NONE : value >= 100 ? whole(value) : value.toLocaleString("en", { maximumFractionDigits: 1 }));
export const small = (value) => (value === null || value === undefined ? NONE : value === 0 ? "0" : value.toExponential(1));
export const bytes = (value) => {
  if (value === null || value === undefined) return NONE;
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (Math.abs(value) < 1000) return `${value < 10 && unit !== "B" ? value.toFixed(1) : Math.round(value)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} PB`;
};
export const ago = (seconds) => {
  if (seconds === null || seconds === undefined) return NONE;
  seconds = Math.max(0, seconds);
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
};
export const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });
export const moment = (at, span) => {
  const when = new Date(at * 1000);
  const time = when.toLocaleTimeString([], { hour12: false });
  return span > 86400 ? `${when.toLocaleDateString([], { month: "short", day: "numeric" })} ${time}` : time;
};
export const dated = (at) => new Date(at * 1000).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false });
export const short = (peerId) => peerId.slice(-8);
