// Prints what Prometheus Operator would give to a Prometheus: its configuration and its rules, by the operator's
// own code.
//
// Standard input: {"prometheus": a Prometheus object, "namespaces": [Namespace, …], "objects": [ServiceMonitor,
// PodMonitor or PrometheusRule, …]}. The Prometheus object's selectors choose among them, as in a cluster.
// Standard output: {"config": text, "rules": {file name: text}}. An object that the operator would leave out is
// an error here, with the operator's reason.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring"
	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/prometheus-operator/prometheus-operator/pkg/assets"
	"github.com/prometheus-operator/prometheus-operator/pkg/operator"
	"github.com/prometheus-operator/prometheus-operator/pkg/prometheus"
	metrics "github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/yaml"
)

type question struct {
	Prometheus json.RawMessage    `json:"prometheus"`
	Namespaces []corev1.Namespace `json:"namespaces"`
	Objects    []json.RawMessage  `json:"objects"`
}

type answer struct {
	Config string            `json:"config"`
	Rules  map[string]string `json:"rules"`
}

// objects holds what was given, by kind.
type objects struct {
	services []*monitoringv1.ServiceMonitor
	pods     []*monitoringv1.PodMonitor
	rules    []*monitoringv1.PrometheusRule
}

func main() {
	if err := run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "promconfig:", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer) error {
	var asked question
	if err := json.NewDecoder(in).Decode(&asked); err != nil {
		return err
	}
	server := &monitoringv1.Prometheus{}
	if err := yaml.UnmarshalStrict(asked.Prometheus, server); err != nil {
		return fmt.Errorf("prometheus: %w", err)
	}
	given, err := read(asked.Objects)
	if err != nil {
		return err
	}

	config, err := configure(server, asked.Namespaces, given)
	if err != nil {
		return err
	}
	rules, err := translate(server, asked.Namespaces, given.rules)
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(answer{string(config), rules})
}

// read decodes the objects strictly: an unknown field is an error, as the API server would say it.
func read(raw []json.RawMessage) (objects, error) {
	var given objects
	for number, one := range raw {
		var kind metav1.TypeMeta
		if err := json.Unmarshal(one, &kind); err != nil {
			return given, fmt.Errorf("object %d: %w", number, err)
		}
		var into any
		switch kind.Kind {
		case monitoringv1.ServiceMonitorsKind:
			given.services = append(given.services, &monitoringv1.ServiceMonitor{})
			into = given.services[len(given.services)-1]
		case monitoringv1.PodMonitorsKind:
			given.pods = append(given.pods, &monitoringv1.PodMonitor{})
			into = given.pods[len(given.pods)-1]
		case monitoringv1.PrometheusRuleKind:
			given.rules = append(given.rules, &monitoringv1.PrometheusRule{})
			into = given.rules[len(given.rules)-1]
		default:
			return given, fmt.Errorf("object %d: %q is neither a monitor nor a rule of %s", number, kind.Kind,
				monitoring.GroupName)
		}
		if err := yaml.UnmarshalStrict(one, into); err != nil {
			return given, fmt.Errorf("object %d, a %s: %w", number, kind.Kind, err)
		}
	}
	return given, nil
}

// configure selects and validates the monitors and generates the configuration, as the operator does for each
// change.
func configure(server *monitoringv1.Prometheus, namespaces []corev1.Namespace, given objects) ([]byte, error) {
	said := &strings.Builder{}
	log := slog.New(slog.NewTextHandler(said, &slog.HandlerOptions{Level: slog.LevelWarn}))
	client := fake.NewSimpleClientset().CoreV1()
	store := assets.NewStoreBuilder(client, client)
	informer := cache.NewSharedIndexInformer(nil, &corev1.Namespace{}, 0, cache.Indexers{})
	for number := range namespaces {
		if err := informer.GetStore().Add(&namespaces[number]); err != nil {
			return nil, err
		}
	}
	selector, err := prometheus.NewResourceSelector(log, server, store, informer,
		operator.NewMetrics(metrics.NewRegistry()), record.NewFakeRecorder(1000))
	if err != nil {
		return nil, err
	}

	services, err := selector.SelectServiceMonitors(context.Background(), list(given.services))
	if err != nil {
		return nil, err
	}
	pods, err := selector.SelectPodMonitors(context.Background(), list(given.pods))
	if err != nil {
		return nil, err
	}
	generator, err := prometheus.NewConfigGenerator(log, server, prometheus.WithEndpointSliceSupport())
	if err != nil {
		return nil, err
	}
	config, err := generator.GenerateServerConfiguration(server, services, pods, nil, nil, store, nil, nil, nil, nil)
	if err != nil {
		return nil, err
	}
	// A monitor that is left out, or a field that is not supported, is only logged.
	if said.Len() != 0 {
		return nil, errors.New(strings.TrimSpace(said.String()))
	}
	return config, nil
}

// list answers the operator's questions for objects of one kind.
func list[T metav1.Object](given []T) prometheus.ListAllByNamespaceFn {
	return func(namespace string, selector labels.Selector, add cache.AppendFunc) error {
		for _, one := range given {
			if one.GetNamespace() == namespace && selector.Matches(labels.Set(one.GetLabels())) {
				add(one)
			}
		}
		return nil
	}
}

// translate makes the rule files of the rules that the server selects; each must pass the operator's validation.
func translate(server *monitoringv1.Prometheus, namespaces []corev1.Namespace,
	rules []*monitoringv1.PrometheusRule) (map[string]string, error) {
	byLabel, err := metav1.LabelSelectorAsSelector(server.Spec.RuleSelector)
	if err != nil {
		return nil, err
	}
	places := []string{server.Namespace}
	if server.Spec.RuleNamespaceSelector != nil {
		byPlace, err := metav1.LabelSelectorAsSelector(server.Spec.RuleNamespaceSelector)
		if err != nil {
			return nil, err
		}
		places = nil
		for _, one := range namespaces {
			if byPlace.Matches(labels.Set(one.Labels)) {
				places = append(places, one.Name)
			}
		}
	}

	files := map[string]string{}
	for _, rule := range rules {
		if !slices.Contains(places, rule.Namespace) || !byLabel.Matches(labels.Set(rule.Labels)) {
			continue
		}
		if err := errors.Join(operator.ValidateRule(rule.Spec)...); err != nil {
			return nil, fmt.Errorf("PrometheusRule %s/%s: %w", rule.Namespace, rule.Name, err)
		}
		text, err := yaml.Marshal(rule.Spec)
		if err != nil {
			return nil, err
		}
		files[fmt.Sprintf("%s-%s.yaml", rule.Namespace, rule.Name)] = string(text)
	}
	return files, nil
}
